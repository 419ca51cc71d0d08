{{- /* Labels of every object; `part` says which of them it belongs to. Call with (dict "top" $ "part" "manager"). */ -}}
{{- define "sojourn.labels" -}}
{{ include "sojourn.selector" . }}
app.kubernetes.io/version: {{ .top.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .top.Chart.Name .top.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "sojourn.selector" -}}
app.kubernetes.io/name: sojourn
app.kubernetes.io/instance: {{ .top.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- /* Pod Security `restricted`, for every pod of the chart's own. */ -}}
{{- define "sojourn.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "sojourn.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* What a manager, `keys` and the test of the release are told of where things are. */ -}}
{{- define "sojourn.env" -}}
- {name: SOJOURN_CONFIG, value: /etc/sojourn/sojourn.toml}
- {name: SOJOURN_DATA_DIR, value: /var/lib/sojourn}
- {name: SOJOURN_REDIS_URL_FILE, value: /etc/sojourn-secrets/redis-url}
- {name: SOJOURN_MANAGER_SECRET_FILE, value: /etc/sojourn-secrets/manager-secret}
- {name: SOJOURN_KEY_PEPPER_FILE, value: /etc/sojourn-secrets/key-pepper}
- {name: SANDBOX_CLEANUP_AUTH_SECRET_FILE, value: /etc/sojourn-secrets/cleanup-auth-secret}
{{- with .Values.manager.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sojourn.mounts" -}}
- {name: config, mountPath: /etc/sojourn, readOnly: true}
- {name: secrets, mountPath: /etc/sojourn-secrets, readOnly: true}
- {name: data, mountPath: /var/lib/sojourn}
- {name: tmp, mountPath: /tmp}
{{- if not .Values.objects.url }}
- {name: objects, mountPath: /var/lib/sojourn-objects}
{{- end }}
{{- end }}

{{- define "sojourn.volumes" -}}
- name: config
  configMap: {name: {{ .Values.manager.name }}}
- name: secrets
  secret:
    secretName: {{ .Values.secret.name }}
    defaultMode: 0440
    items:
      {{- range list "manager-secret" "key-pepper" "cleanup-auth-secret" "redis-url" }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
- name: data
  emptyDir: {sizeLimit: 20Gi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if not .Values.objects.url }}
- name: objects
  persistentVolumeClaim: {claimName: {{ .Values.manager.name }}-objects}
{{- end }}
{{- end }}

{{- /* A volume of one node, whatever its class can: whoever uses it goes where the others are. */ -}}
{{- define "sojourn.besideObjects" -}}
{{- if not .Values.objects.url -}}
podAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          {{- include "sojourn.selector" (dict "top" . "part" "manager") | nindent 10 }}
{{- end }}
{{- end }}

{{- define "sojourn.pullSecrets" -}}
{{- with .Values.manager.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* The image of a profile. */ -}}
{{- define "sojourn.imageOf" -}}
{{ .profile.image | default .top.Values.sandboxImage }}
{{- end }}

{{- /* `restricted` where every pod of the namespace meets it, else `baseline`. */ -}}
{{- define "sojourn.jobsSecurity" -}}
{{- $tier := .Values.cluster.tier | default "split" -}}
{{- $level := "restricted" -}}
{{- range .Values.profiles -}}
{{- if ne (.tier | default $tier) "single" }}{{ $level = "baseline" }}{{ end -}}
{{- end -}}
{{ $level }}
{{- end }}

{{- /* Whether an object that many releases may want is made here: not where somebody else's is there already.
       Call with (dict "top" $ "api" ... "kind" ... "namespace" ... "name" ...). */ -}}
{{- define "sojourn.ours" -}}
{{- $found := lookup .api .kind (.namespace | default "") .name -}}
{{- $notes := dig "metadata" "annotations" (dict) ($found | default dict) | default dict -}}
{{- $mine := and (eq (get $notes "meta.helm.sh/release-name") .top.Release.Name) (eq (get $notes "meta.helm.sh/release-namespace") .top.Release.Namespace) -}}
{{- if or (not $found) $mine }}true{{ end -}}
{{- end }}

{{- define "sojourn.resolvers" -}}
{{- $of := .Values.settings.outbound_resolvers | default (list "1.1.1.1" "8.8.8.8") -}}
{{- toJson $of -}}
{{- end }}
