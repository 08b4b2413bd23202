#!/bin/sh
# Builds flannel's own files of the image, at their paths in the image:
#
#     DIR/flannel                       the CNI plugin, static: it runs on hosts of any kind
#     DIR/opt/bin/install-conf          copies the plugin and its config onto the host; static
#     DIR/opt/bin/flanneld, flannelctl  linked to the C library of the build system
#     DIR/opt/bin/mk-docker-opts.sh     flannelctl docker-opts under its name in Go flannel
#
# The Dockerfile and the tests run this. With a second argument, a target of Rust, it builds nothing
# and takes the programs that were built for that target. Else it needs Rust, a C compiler and
# protoc (Debian: gcc libc6-dev protobuf-compiler libprotobuf-dev). PROFILE is a
# profile of Cargo.toml. CRATES are options of cargo that select crates and features of flanneld and
# flannelctl: tests give those with which they were built already. FLANNEL_COMMIT is the commit that
# the CNI plugin reports as its source.
set -eu
[ $# = 1 ] || [ $# = 2 ] || { echo "usage: build-image-root.sh DIR [TARGET]" >&2; exit 2; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
profile=${PROFILE:-dist}
# The directory of the profile dev is debug.
directory() { if [ "$1" = dev ]; then echo debug; else echo "$1"; fi; }

if [ $# = 2 ]; then
    static=$2
    built=$target/$static/$(directory "$profile")
else
    host=$(rustc -vV | sed -n 's/^host: //p')
    # The same machine and ABI: for armv7-unknown-linux-gnueabihf armv7-unknown-linux-musleabihf.
    static=$(echo "$host" | sed s/-gnu/-musl/)
    built=$target/$(directory "$profile")
    # Docker passes an absent build argument as an empty one.
    [ -n "${FLANNEL_COMMIT:-}" ] || FLANNEL_COMMIT=$(git rev-parse HEAD 2>/dev/null || echo unknown)
    export FLANNEL_COMMIT
    if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$static" ]; then
        rustup target add "$static"
    fi
    # Several words.
    # shellcheck disable=SC2086
    cargo build --quiet --locked --profile "$profile" ${CRATES:--p flanneld -p flannelctl} \
        --bin flanneld --bin flannelctl
    cargo build --quiet --locked --profile "$profile" -p flannel-cni --bins --target "$static"
fi

mkdir -p "$root/opt/bin"
cni_built=$target/$static/$(directory "$profile")
install -m 755 "$built/flanneld" "$built/flannelctl" "$cni_built/install-conf" "$root/opt/bin/"
install -m 755 "$cni_built/flannel" "$root/"
cat >"$root/opt/bin/mk-docker-opts.sh" <<'END'
#!/bin/sh
# Writes flannel's subnet file as options for the Docker daemon.
exec "$(dirname "$0")/flannelctl" docker-opts "$@"
END
chmod 755 "$root/opt/bin/mk-docker-opts.sh"
