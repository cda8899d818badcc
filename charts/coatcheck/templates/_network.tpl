{{/* Pieces of network policies. Nothing here is ever open to everywhere. */}}

{{/* One peer: selectors as they are, a range with its exceptions. Takes (list root peer exceptions). */}}
{{- define "coatcheck.peer" -}}
{{- $peer := index . 1 -}}
{{- if $peer.cidr -}}
{{- include "coatcheck.cidr.block" (list $peer.cidr (concat (first .).Values.networkPolicy.metadataAddresses (last .))) -}}
{{- else -}}
{{- toYaml (pick $peer "namespaceSelector" "podSelector") -}}
{{- end -}}
{{- end -}}

{{/* Pods of another component of this release. Takes (list root component). */}}
{{- define "coatcheck.componentPeer" -}}
podSelector:
  matchLabels:
    {{- include "coatcheck.selectorLabels" . | nindent 4 }}
{{- end -}}

{{/* Egress to the cluster's resolver: UDP, and TCP for answers that do not fit. */}}
{{- define "coatcheck.dnsEgress" -}}
{{- $dns := .Values.networkPolicy.dns -}}
- to:
    {{- range $dns.peers }}
    - {{- include "coatcheck.peer" (list $ . list) | nindent 6 }}
    {{- end }}
    {{- range $dns.nodeLocalAddresses }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{/* Egress that values ask for. Takes (list root rules exceptions). */}}
{{- define "coatcheck.extraEgress" -}}
{{- $root := first . -}}
{{- $exceptions := last . -}}
{{- range index . 1 }}
- to:
    - {{- include "coatcheck.peer" (list $root . $exceptions) | nindent 6 }}
  ports:
    {{- range .ports }}
    - {port: {{ .port }}, protocol: {{ default "TCP" .protocol }}}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Peers that values name, as items of a `from`. Takes (list root peers). */}}
{{- define "coatcheck.clients" -}}
{{- $root := first . -}}
{{- range last . }}
- {{- include "coatcheck.peer" (list $root . list) | nindent 2 }}
{{- end }}
{{- end -}}
