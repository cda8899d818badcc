{{/*
Address ranges. A NetworkPolicy's exception must lie strictly inside its range and be of its family, or the API server
refuses the whole policy; and a wide range without the exception opens the metadata address.
*/}}

{{/* The address of a range as 16-bit numbers, as JSON: two for IPv4, eight for IPv6. Takes "address/length". */}}
{{- define "coatcheck.cidr.groups" -}}
{{- $address := first (splitList "/" .) -}}
{{- $groups := list -}}
{{- if contains ":" $address -}}
  {{- $halves := splitList "::" $address -}}
  {{- $left := compact (splitList ":" (first $halves)) -}}
  {{- $right := gt (len $halves) 1 | ternary (compact (splitList ":" (last $halves))) list -}}
  {{- range $left -}}{{- $groups = append $groups (int64 (printf "0x%s" .)) -}}{{- end -}}
  {{- range until (int (sub 8 (add (len $left) (len $right)))) -}}{{- $groups = append $groups 0 -}}{{- end -}}
  {{- range $right -}}{{- $groups = append $groups (int64 (printf "0x%s" .)) -}}{{- end -}}
{{- else -}}
  {{- $octets := splitList "." $address -}}
  {{- $groups = append $groups (add (mul 256 (atoi (index $octets 0))) (atoi (index $octets 1))) -}}
  {{- $groups = append $groups (add (mul 256 (atoi (index $octets 2))) (atoi (index $octets 3))) -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/* "true" when the second range lies strictly inside the first. Takes (list range range). */}}
{{- define "coatcheck.cidr.holds" -}}
{{- $outer := first . -}}
{{- $inner := last . -}}
{{- $length := atoi (last (splitList "/" $outer)) -}}
{{- $inside := gt (atoi (last (splitList "/" $inner))) $length -}}
{{- $outerGroups := include "coatcheck.cidr.groups" $outer | fromJsonArray -}}
{{- $innerGroups := include "coatcheck.cidr.groups" $inner | fromJsonArray -}}
{{- if ne (len $outerGroups) (len $innerGroups) -}}
  {{- $inside = false -}}
{{- else -}}
  {{- $powers := list 65536 32768 16384 8192 4096 2048 1024 512 256 128 64 32 16 8 4 2 1 -}}
  {{- range $position, $group := $outerGroups -}}
    {{- $bits := min 16 (max 0 (sub $length (mul 16 $position))) -}}
    {{- $unit := index $powers $bits -}}
    {{- if ne (div (int64 $group) $unit) (div (int64 (index $innerGroups $position)) $unit) -}}
      {{- $inside = false -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $inside -}}
{{- end -}}

{{/* An ipBlock with every exception that lies inside it. Takes (list range exceptions). */}}
{{- define "coatcheck.cidr.block" -}}
{{- $range := first . -}}
{{- $inside := list -}}
{{- range last . -}}
  {{- if eq (include "coatcheck.cidr.holds" (list $range .)) "true" -}}{{- $inside = append $inside . -}}{{- end -}}
{{- end -}}
ipBlock:
  cidr: {{ $range | quote }}
  {{- with $inside | uniq }}
  except:
    {{- range . }}
    - {{ . | quote }}
    {{- end }}
  {{- end }}
{{- end -}}
