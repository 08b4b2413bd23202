#!/bin/sh
# Builds what of the image is flannel's own, as it lies in the image:
#
#     DIR/flannel                       the CNI plugin, static: it runs on hosts of any kind
#     DIR/opt/bin/install-conf          copies it and its config onto the host; static
#     DIR/opt/bin/flanneld, flannelctl  for the C library of the system that builds them
#     DIR/opt/bin/mk-docker-opts.sh     flannelctl docker-opts by its old name
#
# The Dockerfile runs this, and so do the tests. It needs Rust, a C compiler and protoc (Debian: gcc libc6-dev protobuf-compiler
# libprotobuf-dev). PROFILE and CNI_PROFILE are profiles of Cargo.toml; FLANNEL_COMMIT is what the CNI plugin says of its origin.
set -eu
[ $# = 1 ] || { echo "usage: build-image-root.sh DIR" >&2; exit 2; }
mkdir -p "$1"
root=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
profile=${PROFILE:-dist}
cni_profile=${CNI_PROFILE:-cni}
host=$(rustc -vV | sed -n 's/^host: //p')
# The same machine and ABI: armv7-unknown-linux-gnueabihf has armv7-unknown-linux-musleabihf.
static=$(echo "$host" | sed s/-gnu/-musl/)
# cargo's directory of the profile dev is called debug.
directory() { if [ "$1" = dev ]; then echo debug; else echo "$1"; fi; }

# Empty is what docker makes of an argument that is not given.
[ -n "${FLANNEL_COMMIT:-}" ] || FLANNEL_COMMIT=$(git rev-parse HEAD 2>/dev/null || echo unknown)
export FLANNEL_COMMIT
if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$static" ]; then
    rustup target add "$static"
fi
cargo build --quiet --locked --profile "$profile" -p flanneld -p flannelctl --bins
cargo build --quiet --locked --profile "$cni_profile" -p flannel-cni --bins --target "$static"

mkdir -p "$root/opt/bin"
install -m 755 "$target/$(directory "$profile")/flanneld" "$target/$(directory "$profile")/flannelctl" "$root/opt/bin/"
install -m 755 "$target/$static/$(directory "$cni_profile")/install-conf" "$root/opt/bin/"
install -m 755 "$target/$static/$(directory "$cni_profile")/flannel" "$root/"
cat >"$root/opt/bin/mk-docker-opts.sh" <<'END'
#!/bin/sh
# Options for the Docker daemon out of flannel's subnet file.
exec "$(dirname "$0")/flannelctl" docker-opts "$@"
END
chmod 755 "$root/opt/bin/mk-docker-opts.sh"
