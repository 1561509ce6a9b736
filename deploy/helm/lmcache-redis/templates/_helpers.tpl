{{/* One name for all objects of a release. */}}
{{- define "lmcache-redis.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{/* Labels that select pods. Of a list: the root and the component. */}}
{{- define "lmcache-redis.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "lmcache-redis.labels" -}}
{{ include "lmcache-redis.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{- define "lmcache-redis.url" -}}
{{- $own := printf "%s-valkey:6379" (include "lmcache-redis.name" .) }}
{{- if .Values.redis.url }}{{ .Values.redis.url }}
{{- else if .Values.valkey.tlsSecretName }}rediss://{{ $own }}?ssl_ca_certs=/run/secrets/redis/valkey-ca.crt
{{- else }}redis://{{ $own }}
{{- end }}
{{- end }}

{{/* Bytes of a size of a setting, or of a quantity of Kubernetes with a B behind it. */}}
{{- define "lmcache-redis.bytes" -}}
{{- $text := kindIs "string" . | ternary . (toString (int64 .)) }}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text }}
{{- $unit := trimPrefix $number $text | trim | upper }}
{{- $base := ternary 1000 1024 (regexMatch "^[KMGTPE]B$" $unit) }}
{{- $size := float64 $number }}
{{- range until (get (dict "K" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6) (trunc 1 $unit) | default 0 | int) }}
{{- $size = mulf $size $base }}
{{- end }}
{{- int64 $size }}
{{- end }}

{{/*
Resources whose memory holds what a setting says. Of a dict: resources, where (of them), size,
setting (its name), beside (bytes). Without a limit it is made; a given one must have room.
*/}}
{{- define "lmcache-redis.resources" -}}
{{- $size := include "lmcache-redis.bytes" .size | float64 }}
{{- $needed := printf "%dMi" (divf (addf (mulf $size 1.25) .beside) 1048576 | ceil | int64) }}
{{- $given := dig "limits" "memory" "" .resources }}
{{- $limit := include "lmcache-redis.bytes" (kindIs "string" $given | ternary (printf "%vB" $given) $given) | float64 }}
{{- if and $given (lt $limit (mulf $size 1.1)) }}
{{- fail (printf "%s.limits.memory is %v, and %s %v: leave the limit out, or set %s" .where $given .setting .size $needed) }}
{{- end }}
{{- $memory := dict "memory" ($given | default $needed) }}
{{- toYaml (mergeOverwrite (dict "requests" (deepCopy $memory) "limits" $memory) (deepCopy .resources)) }}
{{- end }}

{{/*
What the specs of all pods have. Of a dict: root, values (of a component), gpu (whether it needs one).
`pod` of a component comes first, then that of GPUs.
*/}}
{{- define "lmcache-redis.pod" -}}
{{- $pod := deepCopy .values.pod }}
{{- if and .gpu .root.Values.gpu.enabled }}{{ $pod = merge $pod (deepCopy .root.Values.gpu.pod) }}{{ end }}
{{- with .root.Values.imagePullSecrets }}{{ $pod = merge $pod (dict "imagePullSecrets" .) }}{{ end }}
{{- toYaml (merge $pod (dict "automountServiceAccountToken" false "enableServiceLinks" false)) }}
{{- end }}

{{- define "lmcache-redis.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The connections to Redis of agents and gateways: lines of their files of settings. */}}
{{- define "lmcache-redis.connection" -}}
redis-url = {{ include "lmcache-redis.url" . }}
metrics = 0.0.0.0:9464
{{- if .Values.redis.sealSecretName }}
seal-key-file = /run/secrets/redis/seal.keys
{{- end }}
{{- end }}

{{/* One NAME = VALUE a line. YAML's numbers are floats here. */}}
{{- define "lmcache-redis.settings" -}}
{{- range $name, $value := . }}
{{ $name }} = {{ if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- end }}
{{- end }}

{{- define "lmcache-redis.hasSecrets" -}}
{{- if or .Values.redis.secretName .Values.redis.sealSecretName (and .Values.valkey.tlsSecretName (not .Values.redis.url)) }}yes{{ end }}
{{- end }}

{{/* Of agents and gateways. */}}
{{- define "lmcache-redis.secretVolume" -}}
{{- if include "lmcache-redis.hasSecrets" . }}
- name: lmcache-redis-secrets
  projected:
    {{- if .Values.redis.sealSecretName }}
    # Seal keys are for the pod's group at most.
    defaultMode: 0440
    {{- end }}
    sources:
      {{- with .Values.redis.secretName }}
      - secret: {name: {{ . }}}
      {{- end }}
      {{- with .Values.redis.sealSecretName }}
      - secret: {name: {{ . }}, items: [{key: {{ $.Values.redis.sealSecretKey }}, path: seal.keys}]}
      {{- end }}
      {{- if and .Values.valkey.tlsSecretName (not .Values.redis.url) }}
      - secret: {name: {{ .Values.valkey.tlsSecretName }}, items: [{key: ca.crt, path: valkey-ca.crt}]}
      {{- end }}
{{- end }}
{{- end }}

{{- define "lmcache-redis.secretMount" -}}
{{- if include "lmcache-redis.hasSecrets" . }}
- {name: lmcache-redis-secrets, mountPath: /run/secrets/redis, readOnly: true}
{{- end }}
{{- end }}

{{- define "lmcache-redis.passwordVariable" -}}
{{- if .Values.redis.secretName }}
- name: LMCACHE_REDIS_PASSWORD_FILE
  value: /run/secrets/redis/{{ .Values.redis.secretKey }}
{{- end }}
{{- end }}

{{/* The loop turns. Redis may be down: a restart would not help it. */}}
{{- define "lmcache-redis.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: 9464}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: 9464}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
