# Takes down whatever of a cluster there is, however it ended. Sourced, not run.
clean() {
  local pid
  # The kubelet first, so that it does not start again what goes; then pods by force: they are of no more use.
  pid=$(pid_of kubelet) && stop "$pid"
  kill_pods
  local left; left=$(all_ours)
  # shellcheck disable=SC2086 # one word an id
  [ -z "$left" ] || stop $left
  kill_pods
  unmount
  remove_network
  remove_groups
  rm -rf "$runtime" "$state"/{run,pki,etcd,kubelet,cni,kubeconfig}
}

kill_pods() {
  local pids
  for _ in $(seq 50); do
    pids=$(in_pods)
    [ -n "$pids" ] || return 0
    # shellcheck disable=SC2086
    kill -KILL $pids 2>/dev/null
    sleep 0.1
  done
  say "these do not die: $pids"
}

unmount() {
  awk -v state="$state/" -v runtime="$runtime/" 'index($2, state) == 1 || index($2, runtime) == 1 { print $2 }' /proc/mounts |
    sort -r | while read -r where; do umount -l "$(printf '%b' "$where")"; done
}

remove_network() {
  ip link del "$bridge" 2>/dev/null
  for family in ip ip6; do nft delete table $family kube-proxy 2>/dev/null; done
  rm -f /var/lib/cni/results/trimtab-*
  if [ -f "$state/run/sysctl" ]; then xargs -r sysctl -qw <"$state/run/sysctl" 2>/dev/null; fi
  return 0
}

remove_groups() {
  find /sys/fs/cgroup -depth -type d -path "*/$cgroup*" -exec rmdir {} + 2>/dev/null
  return 0
}
