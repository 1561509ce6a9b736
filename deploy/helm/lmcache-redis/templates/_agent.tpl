{{/*
Of agents and of the pods of their engines. Your own pods include, of the scope of this chart:
lmcache-redis.sidecar, .volumes, .mount, .transfer, .podLabels, .podAnnotations and .podSecurity
(docs/guides/kubernetes.md).
*/}}

{{/* Only its owner may enter the directory of the socket. An emptyDir belongs to root: there the
agent makes a directory of its own. */}}
{{- define "lmcache-redis.endpoint" -}}
ipc:///run/lmcache-redis/{{ if eq .Values.mode "sidecar" }}pod/{{ end }}agent.sock
{{- end }}

{{/* The value of vLLM's --kv-transfer-config. */}}
{{- define "lmcache-redis.transfer" -}}
{{- toJson (dict "kv_connector" "LMCacheRedisConnector" "kv_role" "kv_both" "kv_connector_extra_config" (dict "endpoint" (include "lmcache-redis.endpoint" .))) }}
{{- end }}

{{/* Of pods that connect to the chart's Valkey and serve metrics. */}}
{{- define "lmcache-redis.podLabels" -}}
lmcache-redis/client: {{ include "lmcache-redis.name" . }}
{{- end }}

{{/* Changes with the settings that need another agent. It reads its file again for the others:
RELOADABLE of lmcache_redis/agent/main.py. */}}
{{- define "lmcache-redis.podAnnotations" -}}
{{- $reloaded := list "log-level" "write-queue-bytes" "disk-size" "shutdown-deadline-s" }}
{{- $decided := .Values.agent.settings }}
{{- range $reloaded }}{{ $decided = omit $decided . }}{{ end -}}
checksum/lmcache-redis: {{ cat (include "lmcache-redis.connection" .) (include "lmcache-redis.settings" $decided) | sha256sum }}
{{- end }}

{{/* One user for agent and engine: an agent opens only memory of its own user. */}}
{{- define "lmcache-redis.podSecurity" -}}
runAsUser: 10001
runAsGroup: 10001
runAsNonRoot: true
# Owns volumes, and files of secrets that nobody else may read.
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* An item of initContainers: it starts before vLLM and ends after it. */}}
{{- define "lmcache-redis.sidecar" -}}
restartPolicy: Always
{{ include "lmcache-redis.agentContainer" . }}
{{- end }}

{{- define "lmcache-redis.agentContainer" -}}
name: lmcache-redis-agent
image: {{ .Values.agent.image }}
imagePullPolicy: {{ .Values.agent.imagePullPolicy }}
args: [agent, --config, /etc/lmcache-redis/agent.conf]
env:
  - name: LMCACHE_REDIS_ENDPOINT
    value: {{ include "lmcache-redis.endpoint" . }}
  {{- with include "lmcache-redis.passwordVariable" . }}{{ trim . | nindent 2 }}{{ end }}
  {{- if and .Values.gpu.enabled .Values.gpu.visibleDevices }}
  - name: NVIDIA_VISIBLE_DEVICES
    value: {{ .Values.gpu.visibleDevices }}
  - name: NVIDIA_DRIVER_CAPABILITIES
    value: compute,utility
  {{- end }}
  {{- with .Values.agent.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: agent-metrics, containerPort: 9464}
{{ include "lmcache-redis.probes" . }}
{{- if ne .Values.mode "sidecar" }}
{{- /* A sidecar would take its vLLM out of service, which serves without it too. */}}
readinessProbe:
  httpGet: {path: /healthz, port: 9464}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
resources:
  {{- include "lmcache-redis.agentResources" . | nindent 2 }}
securityContext:
  {{- include "lmcache-redis.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "lmcache-redis.mount" . | nindent 2 }}
  - {name: lmcache-redis-settings, mountPath: /etc/lmcache-redis, readOnly: true}
  {{- with include "lmcache-redis.secretMount" . }}{{ trim . | nindent 2 }}{{ end }}
  - {name: lmcache-redis-tmp, mountPath: /tmp}
  {{- if .Values.agent.diskVolume }}
  - {name: lmcache-redis-disk, mountPath: /var/cache/lmcache-redis}
  {{- end }}
  {{- with .Values.agent.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "lmcache-redis.agentResources" -}}
{{- include "lmcache-redis.resources" (dict "resources" .Values.agent.resources "where" "agent.resources" "size" (index .Values.agent.settings "pool-bytes" | default "4GiB") "setting" "agent.settings.pool-bytes" "beside" 2147483648) }}
{{- end }}

{{/* An item of volumeMounts, of agents and engines. */}}
{{- define "lmcache-redis.mount" -}}
- {name: lmcache-redis, mountPath: /run/lmcache-redis}
{{- end }}

{{/* Items of volumes of an engine's pod. */}}
{{- define "lmcache-redis.volumes" -}}
{{- if eq .Values.mode "sidecar" }}
{{- include "lmcache-redis.agentVolumes" . }}
{{- else }}
{{- include "lmcache-redis.endpointVolume" . }}
{{- end }}
{{- end }}

{{- define "lmcache-redis.endpointVolume" -}}
- name: lmcache-redis
  {{- if eq .Values.mode "sidecar" }}
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
  {{- else }}
  hostPath:
    path: {{ .Values.agent.hostPath | default (printf "/run/lmcache-redis/%s/%s" .Release.Namespace (include "lmcache-redis.name" .)) }}
    type: DirectoryOrCreate
  {{- end }}
{{- end }}

{{- define "lmcache-redis.agentVolumes" -}}
{{- include "lmcache-redis.endpointVolume" . }}
- name: lmcache-redis-settings
  configMap:
    name: {{ include "lmcache-redis.name" . }}-agent
{{- with include "lmcache-redis.secretVolume" . }}{{ trim . | nindent 0 }}{{ end }}
- name: lmcache-redis-tmp
  emptyDir: {}
{{- with .Values.agent.diskVolume }}
- name: lmcache-redis-disk
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.agent.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Values that do not fit each other, refused before anything runs. */}}
{{- define "lmcache-redis.checks" -}}
{{- $settings := .Values.agent.settings }}
{{- $deadline := index $settings "shutdown-deadline-s" | default 5 }}
{{- $which := eq .Values.mode "sidecar" | ternary "vllm" "agent" }}
{{- $grace := index .Values $which "pod" "terminationGracePeriodSeconds" | default 30 }}
{{- $_ := include "lmcache-redis.agentResources" . }}
{{- if lt ($grace | float64) (addf $deadline 15) }}
{{- fail (printf "%s.pod.terminationGracePeriodSeconds is %v, and agent.settings.shutdown-deadline-s %v: the agent would be killed in its drain; set at least %v" $which $grace $deadline (addf $deadline 15)) }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") (hasKey .Values.agent.diskVolume "hostPath") }}
{{- fail "agent.diskVolume is a hostPath, which pods of one node would share: with mode sidecar use ephemeral, or mode daemonset" }}
{{- end }}
{{- $claim := dig "ephemeral" "volumeClaimTemplate" "spec" "resources" "requests" "storage" "" .Values.agent.diskVolume }}
{{- $disk := index $settings "disk-size" | default "64GiB" }}
{{- if and $claim (lt (include "lmcache-redis.bytes" (printf "%vB" $claim) | float64) (include "lmcache-redis.bytes" $disk | float64)) }}
{{- fail (printf "agent.diskVolume asks for %v, and agent.settings.disk-size is %v: ask for more, or set a smaller disk-size" $claim $disk) }}
{{- end }}
{{- if not (or .Values.redis.url .Values.redis.secretName) }}
{{- fail "the chart's Valkey needs a password: set redis.secretName, or redis.url for a server of your own" }}
{{- end }}
{{- if and .Values.redis.password (not .Values.redis.secretName) }}
{{- fail "redis.password is kept in a Secret: set redis.secretName" }}
{{- end }}
{{- end }}
