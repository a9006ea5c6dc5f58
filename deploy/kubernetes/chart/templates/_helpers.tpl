{{/* Names and pieces that several objects share. */}}

{{- define "diptych.labels" -}}
app.kubernetes.io/name: diptych
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "diptych.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{- define "diptych.rayToken" -}}
{{ .Values.secrets.rayToken | default (printf "%s-ray-token" .Release.Name) }}
{{- end }}

{{- define "diptych.apiKey" -}}
{{ .Values.secrets.apiKey | default (printf "%s-api-key" .Release.Name) }}
{{- end }}

{{/* Where Ray's head answers: KubeRay's Service of the head, or the leader by the LeaderWorkerSet's. */}}
{{- define "diptych.rayAddress" -}}
{{- if eq .Values.kind "RayCluster" -}}
{{ .Release.Name }}-head-svc:6379
{{- else -}}
{{ .Release.Name }}-nodes-0.{{ .Release.Name }}-nodes:6379
{{- end -}}
{{- end }}

{{/* cluster.yaml: the values, each pool on its group, and routers that join by themselves. */}}
{{- define "diptych.config" -}}
{{- $config := deepCopy .Values.cluster -}}
{{- range $group, $given := .Values.groups -}}
{{- range $given.pools -}}
{{- $pool := get $config.pools . | required (printf "groups.%s names the pool %s: cluster.pools has none" $group .) -}}
{{- $_ := set $pool "label_selector" (dict "diptych.io/group" $group) -}}
{{- end -}}
{{- end -}}
{{- range $name, $pool := $config.pools -}}
{{- if not $pool.label_selector -}}{{- fail (printf "no group has the pool %s: name it in groups" $name) -}}{{- end -}}
{{- end -}}
{{- $router := dict "replicas" 0 "host" "0.0.0.0" "http_port" .Values.routers.httpPort "grpc_port" .Values.routers.grpcPort -}}
{{- $_ := set $config "router" (mergeOverwrite (deepCopy (default dict $config.router)) $router) -}}
{{- with .Values.secrets -}}
{{- if .apiKeysFile }}{{ $_ := set $config.router "api_keys_file" "/etc/diptych-keys/keys.yaml" }}{{ end -}}
{{- if .clientsTls -}}
{{- $pair := dict "cert" "/etc/diptych-clients/tls.crt" "key" "/etc/diptych-clients/tls.key" -}}
{{- $_ := set $config.router "http_tls" $pair }}{{ $_ := set $config.router "grpc_tls" $pair -}}
{{- end -}}
{{- if .clusterTls -}}
{{- $at := "/etc/diptych-cluster/" -}}
{{- $_ := set $config "tls" (dict "ca" (print $at "ca.crt") "cert" (print $at "tls.crt") "key" (print $at "tls.key")) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "drain_timeout_s" .Values.drainSeconds -}}
{{- toYaml $config -}}
{{- end }}

{{/* True where the head's pod calls Kubernetes, for Ray's autoscaler; no other pod does. */}}
{{- define "diptych.callsKubernetes" -}}
{{- and .Values.autoscaling.enabled (eq .Values.kind "RayCluster") -}}
{{- end }}

{{/* Given (list $ component): the keys of a pod's spec that all pods have. */}}
{{- define "diptych.pod" -}}
{{- $root := index . 0 }}{{- $calls := and (eq (index . 1) "head") (eq (include "diptych.callsKubernetes" $root) "true") -}}
serviceAccountName: {{ $root.Release.Name }}{{ if $calls }}-head{{ end }}
automountServiceAccountToken: {{ $calls }}
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- $of := dict "head" $root.Values.head "serve" $root.Values.serve "router" $root.Values.routers "picker" $root.Values.gateway }}
{{- include "diptych.placement" (get $of (index . 1) | default dict) }}
{{- end }}

{{/* Given values of pods of one kind: to which machines they go, and before whom. */}}
{{- define "diptych.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* The keys of a container that all containers have. */}}
{{- define "diptych.container" -}}
image: {{ include "diptych.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{- include "diptych.rights" . | nindent 2 }}
{{- end }}

{{- define "diptych.rights" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: true
{{- end }}

{{/* How a process that KubeRay did not start joins its Ray. */}}
{{- define "diptych.joining" -}}
- {name: RAY_ADDRESS, value: {{ include "diptych.rayAddress" . | quote }}}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
{{ include "diptych.token" . }}
{{- end }}

{{- define "diptych.token" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "diptych.rayToken" . }}, key: auth_token}}
{{- end }}

{{/* Clients' keys, for `diptych serve`. */}}
{{- define "diptych.keys" -}}
- name: DIPTYCH_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "diptych.apiKey" . }}, key: api_key}}
- name: DIPTYCH_METRICS_KEY
  valueFrom: {secretKeyRef: {name: {{ include "diptych.apiKey" . }}, key: metrics_key, optional: true}}
{{- end }}

{{/* Given (list $ component). The root is read-only: Ray writes to /tmp, caches are below the home, Ray's object store is
in /dev/shm. */}}
{{- define "diptych.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/diptych}
- {name: shm, mountPath: /dev/shm}
{{- include "diptych.secretMounts" . }}
{{- end }}

{{/* Given (list $ component): the Secrets that its processes read as files, at the paths that cluster.yaml names. The
supervisor, which is in any of Ray's pods, and every worker and router use the cluster's certificate; only routers the
others. */}}
{{- define "diptych.secretFiles" -}}
{{- $secrets := (index . 0).Values.secrets }}{{- $isRouter := eq (index . 1) "router" -}}
{{- $found := dict -}}
{{- with $secrets.clusterTls }}{{ $_ := set $found "cluster" . }}{{ end -}}
{{- if $isRouter -}}
{{- with $secrets.clientsTls }}{{ $_ := set $found "clients" . }}{{ end -}}
{{- with $secrets.apiKeysFile }}{{ $_ := set $found "keys" . }}{{ end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{- define "diptych.secretMounts" -}}
{{- range $name, $secret := fromYaml (include "diptych.secretFiles" .) }}
- {name: {{ $name }}-secret, mountPath: /etc/diptych-{{ $name }}, readOnly: true}
{{- end }}
{{- end }}

{{/* Readable for the group of the pods' processes alone. */}}
{{- define "diptych.secretVolumes" -}}
{{- range $name, $secret := fromYaml (include "diptych.secretFiles" .) }}
- name: {{ $name }}-secret
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "diptych.modelMount" -}}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}

{{- define "diptych.volumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
{{- include "diptych.secretVolumes" . }}
{{- end }}

{{- define "diptych.modelVolume" -}}
- name: models
  {{- if .Values.models.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.models.claim }}, readOnly: true}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{/* Given (dict "cpu" "memory"): the same for requests and limits, so that no pod is killed for another's use. */}}
{{- define "diptych.resources" -}}
requests: {cpu: {{ .cpu | quote }}, memory: {{ .memory }}}
limits: {cpu: {{ .cpu | quote }}, memory: {{ .memory }}}
{{- end }}

{{/* Given (list $ name group): the pod template of a group's pods, less what starts Ray in them. */}}
{{- define "diptych.groupPod" -}}
{{- $root := index . 0 }}{{- $name := index . 1 }}{{- $group := index . 2 -}}
{{- include "diptych.pod" (list $root "worker") }}
terminationGracePeriodSeconds: {{ add $root.Values.drainSeconds 30 }}
{{- include "diptych.placement" $group }}
{{- with $group.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $group.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  {{- include "diptych.volumes" (list $root "worker") | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $group.sharedMemory | default "256Mi" }}}
  {{- include "diptych.modelVolume" $root | nindent 2 }}
{{- end }}

{{/* Given (list $ name group): the keys of its container. Its workers drain before it ends. */}}
{{- define "diptych.groupContainer" -}}
{{- $root := index . 0 }}{{- $group := index . 2 -}}
{{- include "diptych.container" $root }}
lifecycle:
  preStop:
    exec: {command: [diptych, drain, --timeout, {{ $root.Values.drainSeconds | int64 | quote }}]}
resources:
  {{- $amounts := dict "cpu" ($group.cpu | toString) "memory" $group.memory }}
  {{- with $group.gpu }}{{- $_ := set $amounts "nvidia.com/gpu" (. | toString) }}{{- end }}
  {{- with $group.hugePages }}{{- $_ := set $amounts "hugepages-2Mi" . }}{{- end }}
  requests: {{- toYaml $amounts | nindent 4 }}
  limits: {{- toYaml $amounts | nindent 4 }}
volumeMounts:
  {{- include "diptych.mounts" (list $root "worker") | nindent 2 }}
  {{- include "diptych.modelMount" $root | nindent 2 }}
{{- end }}

{{/* A node of Ray on which nothing is placed: a driver needs one beside it. /tmp outlives a container that ends. */}}
{{- define "diptych.driverNode" -}}
rm -rf /tmp/ray
ray start --address="$RAY_ADDRESS" --num-cpus=0 --num-gpus=0 --object-store-memory=83886080
{{- end }}
