#!/usr/bin/env bash
# Unpacks a kernel in which tests run (test_support::guest), with apt-get. Needs no privileges.
#
#   get-guest.sh uml DIR     user-mode Linux
#   get-guest.sh qemu DIR    QEMU, a kernel of Debian, wg and wireguard-go
#
# A complete DIR is kept. Otherwise its content is replaced.
set -euo pipefail

kind=${1:-} dir=${2:-}
case $kind in
    uml) last=usr/bin/linux.uml ;;
    qemu) last=qemu ;;
    *) dir= ;;
esac
[ -n "$dir" ] || { sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; }
[ ! -x "$dir/$last" ] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "get-guest.sh: needs apt-get, to download packages of Debian" >&2
    exit 1
fi
dir=$(realpath -m "$dir")
mkdir -p "$(dirname "$dir")"
new=$(mktemp -d "$dir.XXXXXX")
trap 'rm -rf "$new"; echo "get-guest.sh: failed; if apt-get did not find a package, its lists may" \
    "be old: apt-get update" >&2' EXIT
chmod 755 "$new"
cd "$new"

# The lists of packages can be absent, or name versions that are not there any more.
[ "$(id -u)" != 0 ] || apt-get update -qq

# Options of apt-get that name the source of packages. Without them, it is that of this machine.
source=()
unpack() {
    local deb
    mkdir debs
    # As root, apt-get warns that its own user cannot write here.
    (cd debs && apt-get "${source[@]}" -o APT::Sandbox::User=root download -qq "$@")
    for deb in debs/*.deb; do dpkg-deb -x "$deb" .; done
    rm -r debs
}

use_debian() {
    if (. /etc/os-release && [ "$ID" = debian ]); then return; fi
    unpack debian-archive-keyring
    mkdir -p apt/state/lists/partial apt/cache/archives/partial
    echo "deb [signed-by=$new/usr/share/keyrings/debian-archive-keyring.gpg]" \
        "http://deb.debian.org/debian bookworm main" >apt/sources
    source=(-o "Dir::Etc::SourceList=$new/apt/sources" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State=$new/apt/state" -o "Dir::Cache=$new/apt/cache" -o APT::Sandbox::User=root)
    apt-get "${source[@]}" update -qq
}

unpack_uml() {
    unpack user-mode-linux
}

# The guest has the files of this machine. Its first program mounts them.
make_initrd() {
    local release=$1 part
    mkdir -p initrd/{bin,host,proc} "initrd/lib/modules/$release/kernel/"{crypto,drivers,fs,net}
    cp bin/busybox initrd/bin
    for part in modules.dep kernel/{crypto/crc32c_generic.ko,drivers/virtio} \
        kernel/{fs/9p,fs/fscache,fs/netfs,net/9p}; do
        cp -r "lib/modules/$release/$part" "initrd/lib/modules/$release/$part"
    done
    cat >initrd/init <<'END'
#!/bin/busybox sh
set -e
busybox() { /bin/busybox "$@"; }
busybox mount -t proc proc /proc
# libcrc32c, and so connection tracking, needs crc32c. modules.dep does not say so.
busybox modprobe -a virtio_pci 9pnet_virtio 9p crc32c_generic
busybox mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=mmap,msize=512000 host /host
busybox mount -t devtmpfs dev /host/dev
busybox umount /proc
exec /bin/busybox switch_root /host "$@"
END
    chmod 755 initrd/init
    (cd initrd && find . | ../bin/busybox cpio -o -H newc) >initrd.img 2>/dev/null
    rm -r initrd
}

unpack_qemu() {
    local libraries package release image offset all part
    # QEMU uses the libraries of this machine, and these that it lacks.
    libraries=$(apt-get install -s --no-install-recommends qemu-system-x86 |
        sed -n 's/^Inst \(lib[^ ]*\).*/\1/p')
    # shellcheck disable=SC2086  # They are several words.
    unpack qemu-system-x86 qemu-system-common qemu-system-data seabios xz-utils $libraries

    use_debian
    unpack busybox-static wireguard-tools wireguard-go
    package=$(apt-cache "${source[@]}" depends linux-image-amd64 |
        sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p')
    release=${package#linux-image-}
    mkdir kernel
    (cd kernel && unpack "$package")
    # The guest takes seconds to decompress its kernel.
    image=kernel/boot/vmlinuz-$release
    offset=$(LC_ALL=C grep -abo $'\xfd7zXZ' "$image" | head -n1 | cut -d: -f1)
    usr/bin/xz -dc --single-stream < <(tail -c "+$((offset + 1))" "$image") >vmlinux
    # Without the drivers of hardware, which are most modules.
    all=$(find kernel -path "*/lib/modules/$release")
    rm -r "$all/kernel/drivers/net/"{ethernet,wireless}
    mkdir -p "lib/modules/$release/kernel/"{drivers,fs}
    for part in modules.{order,builtin} kernel/{arch,crypto,lib,net} \
        kernel/drivers/{net,virtio} kernel/fs/{9p,fscache,netfs}; do
        mv "$all/$part" "lib/modules/$release/$part"
    done
    bin/busybox depmod -b . "$release"
    make_initrd "$release"
    rm -rf kernel apt usr/share/{bash-completion,doc,keyrings,locale,man}

    cat >qemu <<'END'
#!/bin/sh
here=$(dirname "$(realpath "$0")")
libraries=$here/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH="$libraries:$here/lib/x86_64-linux-gnu" QEMU_MODULE_DIR="$libraries/qemu"
exec "$here/usr/bin/qemu-system-x86_64" -L "$here/usr/share/qemu" -L "$here/usr/share/seabios" "$@"
END
    chmod 755 qemu
}

"unpack_$kind"
rm -rf "$dir"
mv -T "$new" "$dir"
trap - EXIT
