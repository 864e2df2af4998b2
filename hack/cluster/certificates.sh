# Certificates and kubeconfigs: each process has its own name and, through RBAC, its own rights. Sourced, not run.
certificates() {
  (umask 077; mkdir -p "$state/pki"; cd "$state/pki"
    openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 30 -subj /CN=trimtab-test-cluster 2>/dev/null
    openssl genrsa -out accounts.key 2048 2>/dev/null
    openssl rsa -in accounts.key -pubout -out accounts.pub 2>/dev/null
    issue apiserver /CN=kube-apiserver "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:10.96.0.1,IP:$node_ip"
    issue apiserver-kubelet /CN=apiserver-kubelet
    issue etcd /CN=etcd "DNS:localhost,IP:127.0.0.1"
    issue kubelet "/O=system:nodes/CN=system:node:$node" "DNS:$node,IP:$node_ip"
    issue admin /O=system:masters/CN=admin
    issue controller-manager /CN=system:kube-controller-manager
    issue scheduler /CN=system:kube-scheduler
    issue proxy /CN=system:kube-proxy
    issue coredns /CN=system:coredns)
  for who in kubelet controller-manager scheduler proxy coredns; do kubeconfig_for $who "$state/run/$who.kubeconfig"; done
  kubeconfig_for admin "$kubeconfig"
}

issue() { # NAME SUBJECT [NAMES]
  openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>/dev/null
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "$1.crt" \
    -extfile <(printf 'extendedKeyUsage=clientAuth,serverAuth\n%s\n' "${3:+subjectAltName=$3}") 2>/dev/null
}

kubeconfig_for() { # NAME FILE
  (umask 077; sed -e "s#AUTHORITY#$(base64 -w0 "$state/pki/ca.crt")#" -e "s#CERTIFICATE#$(base64 -w0 "$state/pki/$1.crt")#" \
    -e "s#KEY#$(base64 -w0 "$state/pki/$1.key")#" -e "s#WHO#$1#" >"$2") <<Y
apiVersion: v1
kind: Config
clusters: [{name: trimtab, cluster: {server: "https://$node_ip:6443", certificate-authority-data: AUTHORITY}}]
users: [{name: WHO, user: {client-certificate-data: CERTIFICATE, client-key-data: KEY}}]
contexts: [{name: trimtab, context: {cluster: trimtab, user: WHO}}]
current-context: trimtab
Y
}
