# The cluster's processes: how each is started, and how they are found again. Sourced, not run.
programs=(etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy coredns containerd kubelet)

command_of() { # NAME: prints its command line, one word a line; every one names a folder of ours
  local pki=$state/pki
  case $1 in
    etcd) printf '%s\n' etcd --data-dir="$state/etcd" --unsafe-no-fsync --log-level=warn \
      --listen-client-urls=https://127.0.0.1:2379 --advertise-client-urls=https://127.0.0.1:2379 \
      --listen-peer-urls=http://127.0.0.1:2380 --client-cert-auth --trusted-ca-file="$pki/ca.crt" \
      --cert-file="$pki/etcd.crt" --key-file="$pki/etcd.key" ;;
    kube-apiserver) printf '%s\n' kube-apiserver --bind-address=$node_ip --secure-port=6443 --advertise-address=$node_ip \
      --etcd-servers=https://127.0.0.1:2379 --etcd-cafile="$pki/ca.crt" --etcd-certfile="$pki/etcd.crt" --etcd-keyfile="$pki/etcd.key" \
      --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" --client-ca-file="$pki/ca.crt" \
      --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$pki/accounts.pub" \
      --service-account-signing-key-file="$pki/accounts.key" --service-cluster-ip-range=$services_cidr \
      --authorization-mode=Node,RBAC --feature-gates=ResourceHealthStatus=true --enable-admission-plugins=NodeRestriction --anonymous-auth=false --profiling=false \
      --kubelet-preferred-address-types=InternalIP --kubelet-certificate-authority="$pki/ca.crt" \
      --kubelet-client-certificate="$pki/apiserver-kubelet.crt" --kubelet-client-key="$pki/apiserver-kubelet.key" ;;
    kube-controller-manager) printf '%s\n' kube-controller-manager --kubeconfig="$state/run/controller-manager.kubeconfig" \
      --bind-address=127.0.0.1 --use-service-account-credentials --service-account-private-key-file="$pki/accounts.key" \
      --root-ca-file="$pki/ca.crt" --cluster-cidr=$pods_cidr --leader-elect=false --profiling=false ;;
    kube-scheduler) printf '%s\n' kube-scheduler --kubeconfig="$state/run/scheduler.kubeconfig" --bind-address=127.0.0.1 \
      --leader-elect=false --profiling=false ;;
    kube-proxy) printf '%s\n' kube-proxy --kubeconfig="$state/run/proxy.kubeconfig" --proxy-mode=nftables \
      --bind-address=$node_ip --healthz-bind-address=127.0.0.1:10256 --metrics-bind-address=127.0.0.1:10249 \
      --cluster-cidr=$pods_cidr --hostname-override=$node \
      --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0 ;;
    coredns) printf '%s\n' coredns -conf "$state/run/Corefile" ;;
    containerd) printf '%s\n' containerd --config "$state/run/containerd.toml" ;;
    kubelet) printf '%s\n' kubelet --config="$state/run/kubelet.yaml" --kubeconfig="$state/run/kubelet.kubeconfig" \
      --hostname-override=$node --node-ip=$node_ip --root-dir="$state/kubelet" \
      --node-labels=topology.kubernetes.io/zone=local,trimtab.dev/tests=true ;;
    *) fail "no process is called $1; there are ${programs[*]}" ;;
  esac
}

# A pid file may outlive its process and its number be given to another: ask the process itself. It is ours where its program is one
# of the cluster's and its command line names a folder of ours.
ours() { # PID
  local program
  program=$(readlink "/proc/$1/exe" 2>/dev/null) || return 1
  case $(basename "${program% (deleted)}") in
    etcd | kube-* | coredns | containerd* | kubelet | runc) ;;
    *) return 1 ;;
  esac
  tr '\0' '\n' <"/proc/$1/cmdline" 2>/dev/null | grep -qF -e "$state/" -e "$runtime/"
}

pid_of() { # NAME: prints the process's id where it runs
  local pid
  for pid in $(cat "$state/run/$1.pid" 2>/dev/null); do
    ours "$pid" && echo "$pid" && return
  done
  return 1
}

start() { # NAME
  local words
  pid_of "$1" >/dev/null && return
  mapfile -t words < <(command_of "$1")
  setsid nohup "${words[@]}" >>"$state/log/$1.log" 2>&1 </dev/null 9>&- &
  echo $! >"$state/run/$1.pid"
}

stop() { # PID…: at once, since nothing they keep is wanted any more
  local pid
  kill -KILL "$@" 2>/dev/null
  for _ in $(seq 100); do
    for pid; do ours "$pid" && sleep 0.05 && continue 2; done
    return 0
  done
  say "these do not die: $*"
}

all_ours() { # prints the ids of all processes of the cluster, pods' apart
  local folder
  for folder in /proc/[0-9]*; do ours "${folder#/proc/}" && echo "${folder#/proc/}"; done
  return 0
}

in_pods() { # prints the ids of all processes in the cluster's control groups
  find /sys/fs/cgroup -type d -path "*/$cgroup*" -name "*" -exec cat {}/cgroup.procs \; 2>/dev/null | sort -u
}
