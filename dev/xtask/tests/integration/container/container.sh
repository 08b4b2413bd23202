# Runs a command in a container, as a container runtime does:
#
#     container.sh ROOT IMAGE CAPABILITIES [SOURCE:TARGET]... -- COMMAND...
#
# It needs a mount namespace of its own. ROOT becomes the root file system, with the programs and
# libraries of this machine, the files of the image over them, and nothing else. The root file
# system and /proc/sys are read-only. SOURCE of the host is mounted at TARGET. The command has only
# the named capabilities, and no program can regain others.
set -eu
root=$1 image=$2 capabilities=$3
shift 3
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs "$root"
for dir in bin sbin lib lib64 usr proc sys dev; do
    if [ -L "/$dir" ]; then
        cp -P "/$dir" "$root/$dir"
    elif [ -d "/$dir" ]; then
        mkdir "$root/$dir"
        mount --rbind "/$dir" "$root/$dir"
    fi
done
# No devices of networks.
[ ! -d "$root/dev/net" ] || mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev/net"
mount --bind /proc/sys "$root/proc/sys"
mount -o remount,bind,ro,nosuid,nodev,noexec "$root/proc/sys"
mkdir -p "$root/etc" "$root/opt/bin"
cp -r /etc/alternatives /etc/ld.so.cache "$root/etc/"
touch "$root/flannel"
mount --bind "$image/flannel" "$root/flannel"
mount --bind "$image/opt/bin" "$root/opt/bin"
while [ "$1" != -- ]; do
    source=${1%%:*} target=$root${1#*:}
    if [ -d "$source" ]; then
        mkdir -p "$target"
    else
        mkdir -p "$(dirname "$target")"
        touch "$target"
    fi
    mount --bind "$source" "$target"
    shift
done
shift
mount -o remount,bind,ro,nosuid,nodev "$root"
keep=-all
for capability in $capabilities; do
    keep=$keep,+$(echo "$capability" | tr '[:upper:]' '[:lower:]')
done
exec env -i PATH=/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    chroot "$root" setpriv --inh-caps=-all --bounding-set="$keep" --no-new-privs -- "$@"
