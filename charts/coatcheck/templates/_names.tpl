{{/* Names and labels. */}}

{{- define "coatcheck.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* A component's object name. Takes (list root component). */}}
{{- define "coatcheck.component" -}}
{{- printf "%s-%s" (include "coatcheck.fullname" (first .)) (last .) -}}
{{- end -}}

{{/* What never changes during an upgrade. Takes (list root component). */}}
{{- define "coatcheck.selectorLabels" -}}
app.kubernetes.io/name: {{ default (first .).Chart.Name (first .).Values.nameOverride }}
app.kubernetes.io/instance: {{ (first .).Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end -}}

{{/* Takes (list root component). */}}
{{- define "coatcheck.labels" -}}
{{ include "coatcheck.selectorLabels" . }}
app.kubernetes.io/version: {{ (first .).Chart.AppVersion | quote }}
app.kubernetes.io/part-of: coatcheck
app.kubernetes.io/managed-by: {{ (first .).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (first .).Chart.Name (first .).Chart.Version }}
{{- end -}}

{{/* A component's URL inside the cluster. Takes (list root component port). */}}
{{- define "coatcheck.url" -}}
{{- $root := first . -}}
{{- printf "https://%s.%s.svc:%d" (include "coatcheck.component" (list $root (index . 1))) $root.Release.Namespace (int (last .)) -}}
{{- end -}}

{{- define "coatcheck.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The control plane's URL as others name it: `iss` of session tokens, `aud` of what is proven to it. */}}
{{- define "coatcheck.issuer" -}}
{{- default (include "coatcheck.url" (list . "control-plane" 8470)) .Values.controlPlane.issuerUrl -}}
{{- end -}}

{{/* Not empty where a registered client proves itself by a secret. */}}
{{- define "coatcheck.hasClientSecrets" -}}
{{- range .Values.controlPlane.clients.registered -}}{{- if not .proofs -}}yes{{- end -}}{{- end -}}
{{- end -}}
