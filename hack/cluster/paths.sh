# Where everything of the test cluster lives, and the few functions its scripts share. Sourced, not run.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/trimtab
tools=${TRIMTAB_TOOLS:-$cache/tools/bin}         # built once; outlives clones
state=${TRIMTAB_CLUSTER:-$cache/cluster}         # certificates, logs, etcd, and the node's images
runtime=/run/trimtab-cluster                     # sockets and mounts of containerd: paths must be short
cgroup=trimtab-cluster
bridge=trimtab0
node=node-0
node_ip=10.244.0.1
pods_cidr=10.244.0.0/24
services_cidr=10.96.0.0/16
kubeconfig=$state/kubeconfig
export PATH=$tools:/usr/local/go/bin:$PATH:/usr/sbin:/sbin

say() { echo "cluster: $*" >&2; }
fail() { say "$*"; exit 1; }
need_root() { [ "$(id -u)" = 0 ] || fail "needs root: it starts containerd and a kubelet"; }
node_ctr() { ctr --address "$runtime/containerd.sock" --namespace k8s.io "$@"; }

wait_for() { # SECONDS COMMAND…
  local until=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $until ] || { say "timed out: $*"; return 1; }
    sleep 0.2
  done
}
