{{/*
RBAC rules of each component. Each verb has its reason beside it; tests/charts/test_rbac.py checks them against the API
server's authorizer. No component may read Secrets through the API, run commands in pods, or change nodes. A user who may
create pipelines chooses the Secrets that their pods mount, as a user who may create pods does (docs/operate/install.md).
*/}}
{{- define "trimtab.watchesNodes" -}}
{{- if and (empty .Values.namespaces) (or .Values.watchNodes .Values.resourceFlavors) }}true{{ end }}
{{- end }}

{{- define "trimtab.operatorRules" -}}
# Pipelines, plans and profiles, read only.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines, pipelineplans, modelprofiles]
  verbs: [list, watch]
# Status, by server-side apply.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines/status, pipelineplans/status]
  verbs: [patch]
# Deployments of replica groups and routers. delete: unused replica groups.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# Services and ConfigMaps. delete: with their replica group.
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
# Accounts of routers and profile Jobs.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# Why a replica is not ready: image, crash, no node. delete: replicas with an unhealthy device.
# patch, if nodes are watched: deletion costs of pods whose nodes are about to go.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete{{ with include "trimtab.watchesNodes" . }}, patch{{ end }}]
{{- if include "trimtab.watchesNodes" . }}
# Nodes that are about to go, read only.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}
# Isolation of pipelines.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# Profile Jobs. delete: a finished or outdated one.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# Monitors of routers, if the Prometheus Operator is installed.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
# Pipelines with spec.deployer: SeldonDeployment, if Seldon Core is installed.
- apiGroups: [machinelearning.seldon.io]
  resources: [seldondeployments]
  verbs: [get, list, watch, create, patch, delete]
# Roles of routers that register tasks: they may change the pipeline's ConfigMaps of tasks. The operator may grant and bind
# only rights of its own, and the two roles below.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [{{ empty .Values.namespaces | ternary "clusterroles" "roles" }}]
  resourceNames: [trimtab-router, trimtab-profiler]
  verbs: [bind]
# Events.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{- define "trimtab.adapterRules" -}}
# Pipelines and profiles, read only.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines, modelprofiles]
  verbs: [list, watch]
# Plans. delete: outdated advisory plans.
- apiGroups: [trimtab.dev]
  resources: [pipelineplans]
  verbs: [get, list, watch, create, patch, delete]
# Status, by server-side apply.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines/status]
  verbs: [patch]
# Endpoints of routers, to read arrivals without Prometheus.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# Events for changes of plans.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* Role of each pipeline's router, bound by the operator. */}}
{{- define "trimtab.routerRules" -}}
# Watches its plan and its replicas; read only.
- apiGroups: [trimtab.dev]
  resources: [pipelineplans]
  verbs: [get, list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- with include "trimtab.edgeKeysSecret" . }}
# The hashed API keys, and no other Secret.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ . }}]
  verbs: [get, list, watch]
{{- end }}
{{- end }}

{{/* Role of each pipeline's profile Jobs, bound by the operator. */}}
{{- define "trimtab.profilerRules" -}}
# The pipeline to profile.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines]
  verbs: [get]
# Profiles. create and patch: server-side apply.
- apiGroups: [trimtab.dev]
  resources: [modelprofiles]
  verbs: [get, create, patch]
{{- end }}

{{/* Leases for leader election in the release's namespace. create cannot be restricted to a name. */}}
{{- define "trimtab.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ . }}]
  verbs: [get, update]
{{- end }}
