{{/*
What each part may do. Every verb has its reason beside it; tests/charts/test_rbac.py holds the API server's authorizer
to what stands here. Nobody may read Secrets by the API, run commands in pods, or touch nodes; but who may create a pipeline
names the Secrets its pods are given, as who may create pods does (docs/operate/install.md).
*/}}
{{- define "trimtab.operatorRules" -}}
# What is asked for, what to make true, what is measured. None of it is written here.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines, pipelineplans, modelprofiles]
  verbs: [list, watch]
# Conditions and amounts, by server-side apply.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines/status, pipelineplans/status]
  verbs: [patch]
# A replica set for each hosting group, the routers. delete: groups that no plan uses any more.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# Their Services and the routers' files. delete: with the hosting group they belong to.
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
# One account for each router and profile Job.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# Why a replica does not become ready: image, crash, no node. Pods themselves belong to their Deployments.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Default deny between pipelines.
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
# Where the Prometheus Operator is installed: monitors of the routers.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
# Where Seldon Core is installed: pipelines with spec.deployer: SeldonDeployment.
- apiGroups: [machinelearning.seldon.io]
  resources: [seldondeployments]
  verbs: [get, list, watch, create, patch, delete]
# The accounts of a pipeline get the two roles below, and no other: bind names them.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [{{ empty .Values.namespaces | ternary "clusterroles" "roles" }}]
  resourceNames: [trimtab-router, trimtab-profiler]
  verbs: [bind]
# Says what happened and why.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{- define "trimtab.adapterRules" -}}
# What is asked for, and what was measured.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines, modelprofiles]
  verbs: [list, watch]
# Plans: written here. delete: advice that nobody asks for any more.
- apiGroups: [trimtab.dev]
  resources: [pipelineplans]
  verbs: [get, list, watch, create, patch, delete]
# Its conditions and amounts, by server-side apply.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines/status]
  verbs: [patch]
# Where the routers are, to read their load without Prometheus.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# One event for each decision that changes a plan.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* Given to each pipeline's router by a RoleBinding of the operator. */}}
{{- define "trimtab.routerRules" -}}
# Follows its plan and its replicas; writes nothing.
- apiGroups: [trimtab.dev]
  resources: [pipelineplans]
  verbs: [get, list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- with include "trimtab.edgeKeysSecret" . }}
# The hashed keys of its callers, and no other Secret.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ . }}]
  verbs: [get, list, watch]
{{- end }}
{{- end }}

{{/* Given to each pipeline's profile Job by a RoleBinding of the operator. */}}
{{- define "trimtab.profilerRules" -}}
# What to measure.
- apiGroups: [trimtab.dev]
  resources: [inferencepipelines]
  verbs: [get]
# What was measured. create and patch: server-side apply.
- apiGroups: [trimtab.dev]
  resources: [modelprofiles]
  verbs: [get, create, patch]
{{- end }}

{{/* In the release's own namespace: who leads. create cannot be bound to a name; update: renewing and letting go. */}}
{{- define "trimtab.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ . }}]
  verbs: [get, update]
{{- end }}
