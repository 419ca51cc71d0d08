{{- /* A value as TOML: JSON's strings are TOML's too, whole numbers come from YAML as floating ones. */ -}}
{{- define "sojourn.toml.value" -}}
{{- if kindIs "map" . -}}
{ {{- range $at, $key := keys . | sortAlpha }}{{ if $at }}, {{ end }}{{ toJson $key }} = {{ include "sojourn.toml.value" (get $ $key) }}{{ end -}} }
{{- else if kindIs "slice" . -}}
[{{ range $at, $one := . }}{{ if $at }}, {{ end }}{{ include "sojourn.toml.value" $one }}{{ end }}]
{{- else if kindIs "string" . -}}
{{ toJson . }}
{{- else if kindIs "bool" . -}}
{{ . }}
{{- else if eq (float64 (int64 .)) (float64 .) -}}
{{ int64 . }}
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{- /* Lines `key = value` of a map; what is null is left out. */ -}}
{{- define "sojourn.toml.lines" -}}
{{- range $key := keys . | sortAlpha }}
{{- $value := get $ $key }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "sojourn.toml.value" $value }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The manager's file. */ -}}
{{- define "sojourn.toml" -}}
metrics_host = "0.0.0.0"
metrics_port = 8781
objects = {{ toJson (.Values.objects.url | default "file:///var/lib/sojourn-objects/records") }}
{{- include "sojourn.toml.lines" .Values.settings }}

[[targets]]
provider = "kubernetes"
namespace = {{ toJson .Values.jobs.namespace }}
{{- include "sojourn.toml.lines" .Values.cluster }}
{{- range $profile := .Values.profiles }}

[[profiles]]
{{- $image := include "sojourn.imageOf" (dict "top" $ "profile" $profile) | trim }}
{{- include "sojourn.toml.lines" (merge (dict "image" $image) $profile) }}
{{- end }}
{{- range $name := keys .Values.projects | sortAlpha }}

[projects.{{ toJson $name }}]
{{- include "sojourn.toml.lines" (get $.Values.projects $name) }}
{{- end }}
{{- end }}
