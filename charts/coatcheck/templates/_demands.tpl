{{/*
What must be said before anything is rendered, all of it told at once. The chart makes no Secret and no CA: one made
here would be another one at the next render.
*/}}
{{- define "coatcheck.demands" -}}
{{- $missing := list -}}
{{- with .Values -}}
{{- if not (or .internalCA.existingConfigMap .internalCA.existingSecret) -}}
  {{- $missing = append $missing "internalCA.existingConfigMap or internalCA.existingSecret: what signed the components' own certificates" -}}
{{- else if and .internalCA.existingConfigMap .internalCA.existingSecret -}}
  {{- $missing = append $missing "internalCA: name a ConfigMap or a Secret, not both" -}}
{{- end -}}
{{- if not .controlPlane.tls.existingSecret -}}
  {{- $missing = append $missing "controlPlane.tls.existingSecret: its serving certificate (tls.crt, tls.key)" -}}
{{- end -}}
{{- if and (eq .controlPlane.kek.provider "files") (not .controlPlane.kek.existingSecret) -}}
  {{- $missing = append $missing "controlPlane.kek.existingSecret: the key-encryption keys, 64 hexadecimal digits each" -}}
{{- end -}}
{{- if not .controlPlane.adminToken.existingSecret -}}
  {{- $missing = append $missing "controlPlane.adminToken.existingSecret: the operators' token" -}}
{{- end -}}
{{- if and (include "coatcheck.hasClientSecrets" $) (not .controlPlane.clients.existingSecret) -}}
  {{- $missing = append $missing "controlPlane.clients.existingSecret: one client secret for each client id" -}}
{{- end -}}
{{- if eq .controlPlane.database.kind "postgresql" -}}
  {{- if not .controlPlane.database.postgresql.existingSecret -}}
    {{- $missing = append $missing "controlPlane.database.postgresql.existingSecret: the database's URL" -}}
  {{- end -}}
{{- else if gt (int .controlPlane.replicas) 1 -}}
  {{- $missing = append $missing "controlPlane.database.kind: postgresql (SQLite serves one replica)" -}}
{{- end -}}
{{- if not .proxy.ca.existingSecret -}}
  {{- $missing = append $missing "proxy.ca.existingSecret: the interception CA (tls.crt, tls.key)" -}}
{{- end -}}
{{- if not .proxy.tls.existingSecret -}}
  {{- $missing = append $missing "proxy.tls.existingSecret: its serving certificate (tls.crt, tls.key)" -}}
{{- end -}}
{{- if not .runtime.tls.existingSecret -}}
  {{- $missing = append $missing "runtime.tls.existingSecret: its serving certificate (tls.crt, tls.key)" -}}
{{- end -}}
{{- if not .runtime.settings.MODEL -}}
  {{- $missing = append $missing "runtime.settings.MODEL: the model that turns are sent to" -}}
{{- end -}}
{{- $kinds := dict -}}
{{- $proofs := dict -}}
{{- range .controlPlane.clients.registered -}}
  {{- $_ := set $kinds .id .kind -}}
  {{- $_ := set $proofs .id (empty .proofs | ternary "secret" (hasKey (default dict .proofs) "workload" | ternary "token" "certificate")) -}}
{{- end -}}
{{- range $name, $values := dict "proxy" .proxy "runtime" .runtime -}}
  {{- $registered := get $proofs $values.clientId -}}
  {{- if and $registered (ne $registered $values.clientProof.kind) -}}
    {{- $missing = append $missing (printf "%s.clientProof.kind: %s, as client %q is registered (token: proofs.workload, certificate: proofs.certificate, secret: no proofs)" $name $registered $values.clientId) -}}
  {{- end -}}
  {{- if eq $values.clientProof.kind "certificate" -}}
    {{- if not $values.clientProof.existingSecret -}}
      {{- $missing = append $missing (printf "%s.clientProof.existingSecret: its client certificate (tls.crt, tls.key)" $name) -}}
    {{- end -}}
    {{- if not $.Values.controlPlane.clientCAs.keys -}}
      {{- $missing = append $missing "controlPlane.clientCAs: what vouches for client certificates" -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if ne (get $kinds .proxy.clientId) "egress_proxy" -}}
  {{- $missing = append $missing (printf "controlPlane.clients.registered: a client %q of kind egress_proxy" .proxy.clientId) -}}
{{- end -}}
{{- if ne (get $kinds .runtime.clientId) "runtime" -}}
  {{- $missing = append $missing (printf "controlPlane.clients.registered: a client %q of kind runtime" .runtime.clientId) -}}
{{- end -}}
{{- end -}}
{{- if $missing -}}
{{- fail (printf "\nCoatcheck needs these values (docs/kubernetes.md shows how to make the Secrets):\n  - %s\n" (join "\n  - " $missing)) -}}
{{- end -}}
{{- end -}}
