#!/bin/sh
# Renders the chart with helm, which HELM names if it is not in the PATH:
#
#     DIR/kube-flannel.yml               the namespace, and the chart with its default values
#     DIR/rendered/NAME.yml              the chart with the values of NAME.values.yaml there
#
# DIR is this directory if it is not given. Run it after each change of the chart. `.ci/long` checks
# that the files are what it writes.
set -eu
[ $# -le 1 ] || { echo "usage: render-manifests.sh [DIR]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here}
helm=${HELM:-helm}
if ! command -v "$helm" >/dev/null; then
    echo "render-manifests.sh: helm is needed. Name it in HELM, or install it:" >&2
    echo "    go install helm.sh/helm/v3/cmd/helm@v3.18.6" >&2
    exit 1
fi
render() { "$helm" template flannel "$here/chart/flannel" --namespace kube-flannel "$@"; }

mkdir -p "$out/rendered"
{
    cat <<'END'
# flannel on Kubernetes: kubectl apply -f kube-flannel.yml
# docs/kubernetes.md explains each object and how to change it.
# deploy/load-image.sh builds the image and loads it into the nodes.
#
# deploy/render-manifests.sh writes this file: change the chart, not this.
---
apiVersion: v1
kind: Namespace
metadata:
  name: kube-flannel
  labels:
    k8s-app: flannel
    # The pod uses the host's network and mounts directories of the host.
    pod-security.kubernetes.io/enforce: privileged
END
    render
} >"$out/kube-flannel.yml"
for name in dual-stack udp; do
    render --values "$here/rendered/$name.values.yaml" >"$out/rendered/$name.yml"
done
