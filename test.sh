#!/usr/bin/env bash
# Runs every test. As root on Debian it installs the tools that tests need. Otherwise it says which
# tools to install.
set -euo pipefail
cd "$(dirname "$0")"

needs=()
command -v ip >/dev/null || [ -x /usr/sbin/ip ] || [ -x /sbin/ip ] || needs+=(iproute2)
command -v ping >/dev/null || needs+=(iputils-ping)
command -v ps >/dev/null || needs+=(procps)
command -v sysctl >/dev/null || [ -x /usr/sbin/sysctl ] || [ -x /sbin/sysctl ] || needs+=(procps)
command -v unshare >/dev/null || needs+=(util-linux)
command -v mount >/dev/null || needs+=(mount)
command -v script >/dev/null || needs+=(bsdutils)
PATH="$PATH:/usr/sbin:/sbin" command -v iptables-nft >/dev/null || needs+=(iptables)
PATH="$PATH:/usr/sbin:/sbin" command -v nft >/dev/null || needs+=(nftables)
command -v strace >/dev/null || needs+=(strace)
PATH="$PATH:/usr/sbin:/sbin" command -v ethtool >/dev/null || needs+=(ethtool)
# Tests run these in namespaces. On the host itself they must not start.
services=()
[ -x /usr/sbin/keepalived ] || services+=(keepalived)
[ -x /usr/sbin/firewalld ] || services+=(firewalld)
[ -x /usr/sbin/ufw ] || services+=(ufw)
needs+=("${services[@]}")
# Elsewhere it comes with a kernel, below.
[ "$(uname -m)" = x86_64 ] || command -v wg >/dev/null || needs+=(wireguard-tools)
command -v systemd-analyze >/dev/null || needs+=(systemd)
command -v cc >/dev/null || needs+=(gcc libc6-dev)
command -v protoc >/dev/null || needs+=(protobuf-compiler)
[ -e /usr/include/google/protobuf/empty.proto ] || needs+=(libprotobuf-dev)
command -v kubectl >/dev/null || needs+=(kubernetes-client)
[ -n "${ETCD:-}" ] || command -v etcd >/dev/null || needs+=(etcd-server)
[ -n "${ETCDCTL:-}" ] || command -v etcdctl >/dev/null || needs+=(etcd-client)
[ -x "${CNI_PLUGINS:-/usr/lib/cni}/bridge" ] || needs+=(containernetworking-plugins)
if [ ${#needs[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        if [ -d /run/systemd/system ] && [ ${#services[@]} -gt 0 ]; then
            systemctl mask "${services[@]}"
        fi
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${needs[@]}"
    else
        echo "test.sh: install these first (Debian: apt-get install): ${needs[*]}" >&2
        if [ ${#services[@]} -gt 0 ]; then
            echo "test.sh: before that, so that they do not start here:" \
                "systemctl mask ${services[*]}" >&2
        fi
        exit 1
    fi
fi
# Only promtool: the package would start a server, and install fonts.
tools=${CARGO_TARGET_DIR:-$PWD/target}/tools
if [ -z "${PROMTOOL:-}" ] && ! command -v promtool >/dev/null && [ ! -x "$tools/promtool" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "test.sh: install promtool of Prometheus first, or name it in PROMTOOL" >&2
        exit 1
    fi
    mkdir -p "$tools/prometheus"
    (
        cd "$tools/prometheus"
        apt-get download -qq prometheus ||
            { apt-get update -qq && apt-get download -qq prometheus; }
        dpkg-deb -x prometheus_*.deb .
        mv usr/bin/promtool ..
    )
    rm -rf "$tools/prometheus"
fi
export PROMTOOL=${PROMTOOL:-$(command -v promtool || echo "$tools/promtool")}
# Kernels for tests of devices that the kernel of this host may lack. They exist for x86-64 only.
if [ "$(uname -m)" = x86_64 ]; then
    if [ -z "${FLANNEL_UML:-}" ] && [ ! -x /usr/bin/linux.uml ]; then
        dev/test-support/get-guest.sh uml "$tools/uml"
        FLANNEL_UML=$(realpath "$tools/uml/usr")
    fi
    if [ -z "${FLANNEL_QEMU:-}" ]; then
        dev/test-support/get-guest.sh qemu "$tools/qemu"
        FLANNEL_QEMU=$(realpath "$tools/qemu")
    fi
    export FLANNEL_UML=${FLANNEL_UML:-/usr} FLANNEL_QEMU
fi
if ! command -v cargo >/dev/null; then
    echo "test.sh: install Rust first: https://rustup.rs" >&2
    exit 1
fi
export PATH="$PATH:/usr/sbin:/sbin"

# Programs of the workspace. Without these variables, tests of other crates build them again, and
# the lab then lacks etcd, which its tests need. All builds have the same features, so none is built
# twice.
target=${CARGO_TARGET_DIR:-target}
FLANNELCTL=$(realpath -m "$target/debug/flannelctl")
FLANNEL_LAB=$(realpath -m "$target/debug/lab")
export FLANNELCTL FLANNEL_LAB

all=(--workspace --all-features)
cargo build "${all[@]}" --bin lab --bin flannel --bin install-conf --bin flanneld --bin flannelctl
# Most tests of daemons wait most of the time: for a lease to come, for packets to be lost. Each
# daemon needs an inotify instance, of which a user has 128.
threads=$((2 * $(nproc)))
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((threads < 16 ? threads : 16))}
# A test that hangs ends after an hour, with all processes that it started. On a terminal, where a
# user can interrupt it, only cargo is ended.
limit=(timeout --kill-after=10)
if [ -t 0 ]; then limit+=(--foreground); fi
"${limit[@]}" 3600 cargo test "${all[@]}" "$@"

# The tests above ran as root. These tests must also pass for an ordinary user.
if [ "$(id -u)" = 0 ]; then
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT
    chmod 755 "$dir"
    built=$(cargo test -q "${all[@]}" --no-run --message-format=json)
    # Prints the paths of the tests of some crates, by the kinds and names of their targets.
    executables() {
        local crates=$1 kinds=$2 names=$3
        local target='"kind":\["\('"$kinds"'\)"\].*"name":"\('"$names"'\)".*"test":true'
        sed -n 's#.*/\('"$crates"'\)/Cargo.toml".*'"$target"'.*"executable":"\([^"]*\)".*#\4#p' \
            <<<"$built"
    }
    netns_crates='flannel-netlink\|flannel-firewall'
    netns_tests=$(executables "$netns_crates" 'lib\|test' '[a-z_]*')
    cni_tests=$(executables flannel-cni test integration)
    daemon_tests=$(executables flanneld test integration)
    image_tests=$(executables xtask test integration)
    for tests in "$netns_tests" "$cni_tests" "$daemon_tests" "$image_tests"; do
        [ -n "$tests" ] || { echo "test.sh: the output of cargo names no such tests" >&2; exit 1; }
    done
    cp "$target/debug/"{lab,flannel,install-conf,flanneld,flannelctl} "$PROMTOOL" \
        $netns_tests $cni_tests $daemon_tests $image_tests "$dir"
    # Each takes minutes at most. The output names a test that hangs.
    as_nobody() {
        (cd / && timeout --kill-after=10 1800 \
            setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/nonexistent "$@")
    }
    if [ "$(uname -m)" = x86_64 ]; then
        mkdir -p "$dir/uml/bin" "$dir/uml/lib"
        cp "$FLANNEL_UML/bin/linux.uml" "$dir/uml/bin"
        cp -r "$FLANNEL_UML/lib/uml" "$dir/uml/lib"
        cp -r "$FLANNEL_QEMU" "$dir/qemu"
    fi
    for test in $netns_tests; do
        as_nobody FLANNEL_UML="$dir/uml" FLANNEL_QEMU="$dir/qemu" \
            "$dir/$(basename "$test")" --quiet
    done
    for test in $daemon_tests; do
        as_nobody FLANNELD="$dir/flanneld" FLANNELCTL="$dir/flannelctl" PROMTOOL="$dir/promtool" \
            "$dir/$(basename "$test")" --quiet \
            etcd:: control:: kube:: adopt:: storm:: interference::
    done
    for test in $cni_tests; do
        as_nobody FLANNEL_CNI="$dir/flannel" INSTALL_CONF="$dir/install-conf" \
            FLANNEL_LAB="$dir/lab" "$dir/$(basename "$test")" --quiet real:: install::
    done
    PROFILE=dev CRATES="${all[*]}" deploy/build-image-root.sh "$dir/image"
    cp -r deploy "$dir"
    # Only root may open /dev/net/tun where udev has not changed its mode.
    for test in $image_tests; do
        as_nobody FLANNEL_IMAGE="$dir/image" FLANNEL_DEPLOY="$dir/deploy" \
            "$dir/$(basename "$test")" --quiet image:: containers:: --skip the_chart_for_udp
    done
    lab=("$dir/lab" --backend vxlan --family dual --json)
    if ! as_nobody "${lab[@]}" >"$dir/lab.json" 2>"$dir/lab.log"; then
        cat "$dir/lab.log" "$dir/lab.json" >&2
        exit 1
    fi
    echo "passed as an ordinary user: the lab; tests of netlink, the firewall, the CNI plugin," \
        "the image, the daemon and flannelctl"
fi
