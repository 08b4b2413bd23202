#!/bin/sh
# Builds flannel's image and loads it into every node of the cluster that kubectl uses:
#
#     load-image.sh            into kind, k3s, or nodes with containerd: it asks the API server
#     load-image.sh NODE...    into these nodes instead of all, by their names for ssh
#
# The image has the name in chart/flannel/values.yaml. It needs docker, kubectl, and for kind the
# program kind, else ssh to the nodes as root or as a user who may run sudo. DOCKER names another
# builder, such as podman. IPTABLES=legacy is for nodes whose `iptables --version` says legacy.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
docker=${DOCKER:-docker}
value() { sed -n "s/^ *$1: *//p" "$here/chart/flannel/values.yaml" | head -n 1; }
image=$(value repository):$(value tag)

# A line for each node: provider, runtime, address.
path='{range .items[*]}{.spec.providerID},{.status.nodeInfo.containerRuntimeVersion},'
path=$path'{.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}'
nodes=$(kubectl get nodes -o "jsonpath=$path")
[ -n "$nodes" ] || { echo "load-image.sh: the cluster has no nodes" >&2; exit 1; }

case $nodes in
kind://*) import= ;;
rke2://*)
    # The version of its containerd ends like that of k3s.
    echo "load-image.sh: RKE2: push the image to a registry instead" >&2
    exit 1
    ;;
*k3s*) import="k3s ctr images import -" ;;
*containerd://*) import="ctr -n k8s.io images import -" ;;
*)
    echo "load-image.sh: expected nodes with containerd; push the image to a registry instead" >&2
    exit 1
    ;;
esac
"$docker" build --file "$here/Dockerfile" --build-arg "IPTABLES=${IPTABLES:-nft}" \
    --tag "$image" "$here/.."

if [ -z "$import" ]; then
    # kind://docker/CLUSTER/NODE
    cluster=${nodes#kind://*/}
    # An archive, because `kind load docker-image` asks docker, also if podman built it.
    archive=$(mktemp)
    trap 'rm -f "$archive"' EXIT
    "$docker" save "$image" >"$archive"
    kind load image-archive "$archive" --name "${cluster%%/*}"
    exit
fi
# A dual-stack node has two addresses.
[ $# -gt 0 ] || set -- $(echo "$nodes" | sed 's/.*,//; s/ .*//')
for node; do
    echo "loading $image into $node"
    "$docker" save "$image" |
        ssh "$node" "if [ \$(id -u) = 0 ]; then $import; else sudo $import; fi"
done
