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

{{/* The component whose pods have an agent. */}}
{{- define "lmcache-redis.agents" -}}
{{ if eq .Values.mode "sidecar" }}vllm{{ else }}agent{{ end }}
{{- end }}

{{- define "lmcache-redis.url" -}}
{{ .Values.redis.url | default (printf "redis://%s-valkey:6379" (include "lmcache-redis.name" .)) }}
{{- end }}

{{/* Only its owner may enter the directory of the socket. An emptyDir belongs to root: there the
agent makes a directory of its own. */}}
{{- define "lmcache-redis.endpoint" -}}
ipc:///run/lmcache-redis/{{ if eq .Values.mode "sidecar" }}pod/{{ end }}agent.sock
{{- end }}

{{/* The user of both images: an agent opens only memory of its own user. */}}
{{- define "lmcache-redis.podSecurity" -}}
runAsUser: 10001
runAsGroup: 10001
runAsNonRoot: true
{{- if .Values.redis.sealSecretName }}
# Owns the files of secrets, which nobody else may read.
fsGroup: 10001
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "lmcache-redis.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "lmcache-redis.agentContainer" -}}
name: agent
image: {{ .Values.agent.image }}
imagePullPolicy: {{ .Values.agent.imagePullPolicy }}
args: [agent, --config, /etc/lmcache-redis/agent.conf]
env:
  - name: LMCACHE_REDIS_PASSWORD_FILE
    value: /run/secrets/redis/password
  {{- if .Values.agent.gpu }}
  - name: NVIDIA_VISIBLE_DEVICES
    value: all
  - name: NVIDIA_DRIVER_CAPABILITIES
    value: compute,utility
  {{- end }}
ports:
  - name: metrics
    containerPort: 9464
# The loop turns. Redis may be down: a restart of the agent would not help it.
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- if ne .Values.mode "sidecar" }}
{{- /* A sidecar would take its vLLM out of service, which serves without it too. */}}
readinessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
resources:
  {{- toYaml .Values.agent.resources | nindent 2 }}
securityContext:
  {{- include "lmcache-redis.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: endpoint, mountPath: /run/lmcache-redis}
  - {name: settings, mountPath: /etc/lmcache-redis, readOnly: true}
  - {name: auth, mountPath: /run/secrets/redis, readOnly: true}
  {{- if .Values.redis.sealSecretName }}
  - {name: seal, mountPath: /run/secrets/seal, readOnly: true}
  {{- end }}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "lmcache-redis.agentVolumes" -}}
- name: settings
  configMap:
    name: {{ include "lmcache-redis.name" . }}-agent
- name: auth
  secret:
    secretName: {{ .Values.redis.secretName }}
{{- with .Values.redis.sealSecretName }}
- name: seal
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
- name: tmp
  emptyDir: {}
{{- end }}
