{{- /* What a schema cannot say. Every message names the value and what helps. */ -}}
{{- define "sojourn.checks" -}}
{{- $v := .Values -}}
{{- if not $v.manager.image }}{{ fail "manager.image is needed: the manager's image, made with images/manager/Containerfile" }}{{ end -}}
{{- if eq $v.jobs.namespace .Release.Namespace }}{{ fail (printf "jobs.namespace is %q, the release's own: sandboxes need a namespace of their own, and nothing else may be in it" $v.jobs.namespace) }}{{ end -}}
{{- if not $v.profiles }}{{ fail "profiles must name at least one: sandboxes-default" }}{{ end -}}
{{- $names := list -}}
{{- range $v.profiles -}}
{{- if has .name $names }}{{ fail (printf "profiles: %q is there twice" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- if not (or .image $v.sandboxImage) }}{{ fail (printf "profiles: %s: image is needed, by digest, or sandboxImage for all profiles that name none" .name) }}{{ end -}}
{{- $class := .network | default "none" -}}
{{- if not (or (eq $class "none") (hasKey $v.network.classes $class)) }}{{ fail (printf "profiles: %s: network %q is no class of network.classes; there are none, %s" .name $class (keys $v.network.classes | sortAlpha | join ", ")) }}{{ end -}}
{{- if and .storage_class (ne (.workspace | default "scratch") "volume") }}{{ fail (printf "profiles: %s: storage_class is a volume's, and workspace is not \"volume\"" .name) }}{{ end -}}
{{- with .pool -}}
{{- if and (hasKey . "size") (or (hasKey . "min") (hasKey . "max")) }}{{ fail "profiles: a pool has a size, or a min and a max, not both" }}{{ end -}}
{{- if and (hasKey . "min") (hasKey . "max") (gt (int .min) (int .max)) }}{{ fail "profiles: pool needs 0 <= min <= max" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if not (has "sandboxes-default" $names) }}{{ fail "profiles: sandboxes-default is needed: it is what projects use that are not listed" }}{{ end -}}
{{- range $name, $project := $v.projects -}}
{{- range $project.profiles }}{{ if not (has . $names) }}{{ fail (printf "projects: %s: there is no profile %q; there are %s" $name . (join ", " $names)) }}{{ end }}{{ end -}}
{{- end -}}
{{- if and $v.autoscaling.enabled $v.keda.enabled }}{{ fail "autoscaling and keda would both set the number of managers: enable one of them" }}{{ end -}}
{{- if and $v.keda.enabled (not $v.keda.prometheus) }}{{ fail "keda.prometheus is needed: the address of the Prometheus that scrapes the managers" }}{{ end -}}
{{- with $v.warmNodes.placeholders.followPool -}}
{{- if not (has . $names) }}{{ fail (printf "warmNodes.placeholders.followPool: there is no profile %q; there are %s" . (join ", " $names)) }}{{ end -}}
{{- if not $v.keda.prometheus }}{{ fail "warmNodes.placeholders.followPool is KEDA's work: keda.prometheus is needed" }}{{ end -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) }}{{ fail "ingress.host is needed where ingress.enabled is true" }}{{ end -}}
{{- if and $v.worker.enabled (not $v.worker.image) }}{{ fail "worker.image is needed where worker.enabled is true: your program's image" }}{{ end -}}
{{- if hasKey $v.network.classes "none" }}{{ fail "network.classes: `none` reaches nothing and cannot be another" }}{{ end -}}
{{- range $class, $rules := $v.network.classes -}}
{{- range $rules -}}
{{- if or (hasPrefix "169.254." .cidr) (hasPrefix "fe80:" .cidr) (hasPrefix "fd00:ec2::" .cidr) }}{{ fail (printf "network.classes.%s: %s holds a cloud's metadata, which no sandbox may reach" $class .cidr) }}{{ end -}}
{{- if and (hasSuffix "/0" .cidr) (not (has .cidr (list "0.0.0.0/0" "::/0"))) }}{{ fail (printf "network.classes.%s: write 0.0.0.0/0 or ::/0 instead of %s" $class .cidr) }}{{ end -}}
{{- if regexMatch "/[1-7]$" .cidr }}{{ fail (printf "network.classes.%s: %s is wider than a /8 and would hold private networks: name narrower ones, or 0.0.0.0/0, which is without them" $class .cidr) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace $v.secret.name -}}
{{- if $found -}}
{{- $needed := list "manager-secret" "key-pepper" "cleanup-auth-secret" "redis-url" -}}
{{- if $v.redis.own }}{{ $needed = append $needed "redis-password" }}{{ end -}}
{{- range $needed }}{{ if not (hasKey ($found.data | default dict) .) }}{{ fail (printf "the Secret %s is there and has no key %s; docs/kubernetes.md says what each of its keys is" $v.secret.name .) }}{{ end }}{{ end -}}
{{- else if and $v.secret.generate (not $v.redis.own) .Release.IsInstall }}{{ fail (printf "redis.own is false, and nobody but you knows your Redis: make the Secret %s with redis-url in it, as docs/kubernetes.md says, and set secret.generate=false" $v.secret.name) }}
{{- end -}}
{{- end }}
