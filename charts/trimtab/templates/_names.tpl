{{/* Names, labels and common parts of this chart's pods. */}}
{{- define "trimtab.fullname" -}}
{{- .Values.fullnameOverride | default "trimtab" | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "trimtab.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Selector labels of a component's pods; immutable in a release. Takes (list $ "operator"). */}}
{{- define "trimtab.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "trimtab.image" -}}
{{ printf "%s:%s" .repository (.tag | default "latest") }}
{{- end }}

{{/* Common part of all pod specs. Takes (list $ "operator"). */}}
{{- define "trimtab.pod" -}}
{{- $root := index . 0 -}}
serviceAccountName: {{ include "trimtab.fullname" $root }}-{{ index . 1 }}
automountServiceAccountToken: true
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $root.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.tolerations }}
tolerations: {{- toYaml . | nindent 0 }}
{{- end }}
{{- with $root.Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "trimtab.podMetadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "trimtab.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
  {{- with $root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $own := dict }}
{{- if gt (len .) 2 }}{{ $own = index . 2 }}{{ end }}
{{- with merge (dict) $own $root.Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Probes and ports of operator and adapter. */}}
{{- define "trimtab.observed" -}}
ports:
- {name: health, containerPort: 8080}
- {name: metrics, containerPort: 9090}
livenessProbe:
  httpGet: {path: /healthz, port: health}
  initialDelaySeconds: 10
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* Arguments, mounts and volumes of the Prometheus client. */}}
{{- define "trimtab.prometheusArguments" -}}
{{- with .Values.prometheus.url }}
- --prometheus={{ . }}
{{- end }}
{{- if .Values.prometheus.tokenSecret.name }}
- --prometheus-token-file=/etc/trimtab/prometheus-token/token
{{- else if .Values.prometheus.tokenFile }}
- --prometheus-token-file={{ .Values.prometheus.tokenFile }}
{{- end }}
{{- if .Values.prometheus.caSecret.name }}
- --prometheus-ca=/etc/trimtab/prometheus-ca/ca.crt
{{- end }}
{{- end }}

{{- define "trimtab.prometheusMounts" -}}
{{- if .Values.prometheus.tokenSecret.name }}
- {name: prometheus-token, mountPath: /etc/trimtab/prometheus-token, readOnly: true}
{{- end }}
{{- if .Values.prometheus.caSecret.name }}
- {name: prometheus-ca, mountPath: /etc/trimtab/prometheus-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "trimtab.prometheusVolumes" -}}
{{- with .Values.prometheus.tokenSecret }}
{{- if .name }}
- name: prometheus-token
  secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: token}]}
{{- end }}
{{- end }}
{{- with .Values.prometheus.caSecret }}
{{- if .name }}
- name: prometheus-ca
  secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}]}
{{- end }}
{{- end }}
{{- end }}

{{/* Blocked ranges of one IP version. Takes (list $ true) for version 6. */}}
{{- define "trimtab.blocked" -}}
{{- $found := list -}}
{{- range (index . 0).Values.networkPolicies.blocked -}}
{{- if eq (contains ":" .) (index $ 1) -}}
{{- $found = append $found . -}}
{{- end -}}
{{- end -}}
{{ toJson $found }}
{{- end }}
