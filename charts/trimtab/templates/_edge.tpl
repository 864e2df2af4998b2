{{/* Edge settings of each pipeline's proxy: paths of secrets in the pods, never secrets. */}}
{{- define "trimtab.edge" -}}
{{- $edge := .Values.edge }}
{{- $settings := dict "clients" $edge.clients "timeouts" $edge.timeouts "maxConnections" (int $edge.maxConnections) "maxStreams" (int $edge.maxStreams) "trustedHops" (int $edge.trustedHops) "accessLog" $edge.accessLog "accessLogFields" $edge.accessLogFields "memory" $edge.memory "jwt" $edge.jwt }}
{{- if include "trimtab.edgeTlsSecret" . }}
{{- $tls := dict "certificate" "/etc/trimtab-tls/tls.crt" "key" "/etc/trimtab-tls/tls.key" }}
{{- if $edge.tls.clientCa }}
{{- $_ := set $tls "clientCa" "/etc/trimtab-tls/ca.crt" }}
{{- end }}
{{- $_ := set $settings "tls" $tls }}
{{- end }}
{{- if and $edge.tls.clientCa (not (include "trimtab.edgeTlsSecret" .)) }}
{{- fail "edge.tls.clientCa needs edge.tls.secretName, or edge.secure: ca.crt is an entry of that Secret" }}
{{- end }}
{{- with include "trimtab.edgeKeysSecret" . }}
{{- $_ := set $settings "keysSecret" . }}
{{- end }}
{{- if and $edge.replicas.name (not $edge.replicas.tlsSecret) }}
{{- fail "edge.replicas.name needs edge.replicas.tlsSecret: a name requires certificates" }}
{{- end }}
{{- if $edge.replicas.tlsSecret }}
{{- $_ := set $settings "replicas" (dict "certificate" "/etc/trimtab-replicas/tls.crt" "key" "/etc/trimtab-replicas/tls.key" "ca" "/etc/trimtab-replicas/ca.crt" "name" $edge.replicas.name) }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{- define "trimtab.edgeTlsSecret" -}}
{{- .Values.edge.tls.secretName | default (.Values.edge.secure | ternary "trimtab-tls" "") }}
{{- end }}

{{- define "trimtab.edgeKeysSecret" -}}
{{- .Values.edge.keysSecret | default (.Values.edge.secure | ternary "trimtab-keys" "") }}
{{- end }}
