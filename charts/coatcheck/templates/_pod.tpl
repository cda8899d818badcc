{{/* What the pods of all three components have in common. */}}

{{/* Top of a pod's spec. Takes (list root component values). */}}
{{- define "coatcheck.pod" -}}
{{- $root := first . -}}
{{- $values := last . -}}
serviceAccountName: {{ include "coatcheck.component" (list $root (index . 1)) }}
automountServiceAccountToken: false
{{- /* A Service called coatcheck-proxy would otherwise put COATCHECK_PROXY_PORT and the like into the environment. */}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml . | nindent 4 }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels:
        {{- include "coatcheck.selectorLabels" (list $root (index $ 1)) | nindent 8 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* A pod template's metadata. Takes (list root component values annotations). */}}
{{- define "coatcheck.podMetadata" -}}
{{- $values := index . 2 -}}
labels:
  {{- include "coatcheck.labels" (list (first .) (index . 1)) | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (last .) $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Top of a container. Takes (list root component values). */}}
{{- define "coatcheck.container" -}}
{{- $root := first . -}}
name: {{ index . 1 }}
image: {{ include "coatcheck.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
args: [serve, {{ index . 1 }}]
securityContext:
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- with (last .).resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Settings given by name, as environment variables. Takes (list prefix settings). */}}
{{- define "coatcheck.settings" -}}
{{- $prefix := first . -}}
{{- range $name, $value := last . }}
- name: {{ $prefix }}{{ $name }}
  {{- if kindIs "float64" $value }}
  {{- /* Every number of a values file is a float, and a large one would print as 2e+06. */}}
  value: {{ eq (floor $value) $value | ternary (int64 $value | toString) (toString $value) | quote }}
  {{- else }}
  value: {{ $value | toString | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where the internal CA is read from, as an item of a projected volume. */}}
{{- define "coatcheck.internalCA" -}}
{{- with .Values.internalCA -}}
{{- if .existingConfigMap -}}
configMap:
  name: {{ .existingConfigMap }}
{{- else -}}
secret:
  name: {{ .existingSecret }}
{{- end }}
  items: [{key: {{ .key }}, path: internal-ca.crt}]
{{- end -}}
{{- end -}}

{{/* Room for what a library insists on writing; never on a disk. */}}
{{- define "coatcheck.tmp" -}}
name: tmp
emptyDir: {medium: Memory, sizeLimit: 64Mi}
{{- end -}}
