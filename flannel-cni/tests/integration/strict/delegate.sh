#!/bin/sh
# A delegate that accepts only calls that the specification allows. It writes every call to the
# file `calls` beside its directory, lists its containers in `attached`, and fails with the error in
# the file `fail-COMMAND`.
set -u
here=$(dirname "$0")/..
fail() {
    printf '{"cniVersion":"1.1.0","code":%s,"msg":"%s"}\n' "$1" "$2"
    exit 1
}
has() {
    case "$conf" in
    *"$1"*) ;;
    *) fail 7 "strict: the config lacks $(printf %s "$1" | tr -d '"')" ;;
    esac
}
hasnt() {
    case "$conf" in
    *"$1"*) fail 7 "strict: the config has $(printf %s "$1" | tr -d '"')" ;;
    esac
}

conf=$(cat)
if [ "$CNI_COMMAND" = VERSION ]; then
    : >"$here/asked-version"
    all='"0.3.1","0.4.0","1.0.0","1.1.0"'
    printf '{"cniVersion":"1.0.0","supportedVersions":[%s]}\n' "${STRICT_VERSIONS:-$all}"
    exit
fi
echo "$CNI_COMMAND|$CNI_CONTAINERID|$CNI_IFNAME|$CNI_NETNS|${CNI_ARGS:-}|$conf" >>"$here/calls"
echo "strict delegate: $CNI_COMMAND" >&2

has "\"type\":\"$(basename "$0")\""
has '"name":"'
has '"ipam":{'
hasnt '"capabilities"'
version=${STRICT_VERSION:-1.1.0}
[ "$version" = none ] && hasnt '"cniVersion"' || has "\"cniVersion\":\"$version\""
case $CNI_COMMAND in
ADD | CHECK) [ -n "$CNI_NETNS" ] || fail 4 "strict: no CNI_NETNS" ;;
DEL | STATUS | GC) ;;
*) fail 4 "strict: $CNI_COMMAND" ;;
esac
attachment=$CNI_CONTAINERID:$CNI_IFNAME
case $CNI_COMMAND in
STATUS | GC) ;;
*)
    [ -n "$CNI_CONTAINERID" ] && [ -n "$CNI_IFNAME" ] ||
        fail 4 "strict: no container or interface"
    ;;
esac
[ "$CNI_COMMAND" = GC ] && has '"cni.dev/valid-attachments":[' ||
    hasnt '"cni.dev/valid-attachments"'
mkdir -p "$here/attached"

if [ "$CNI_COMMAND" = ADD ]; then
    hasnt '"prevResult"'
    [ -z "${STRICT_SAVED:-}" ] || [ -s "$STRICT_SAVED" ] ||
        fail 999 "strict: called before $STRICT_SAVED was saved"
    [ -e "$here/attached/$attachment" ] && fail 999 "strict: $attachment exists already"
    : >"$here/attached/$attachment"
fi
if [ -e "$here/fail-$CNI_COMMAND" ]; then
    cat "$here/fail-$CNI_COMMAND"
    exit 1
fi
case $CNI_COMMAND in
ADD)
    answer="{\"cniVersion\":\"$version\",  \"ips\":[], \"new\": {\"kept\": true}}"
    printf '%s' "${STRICT_ANSWER:-$answer}"
    ;;
DEL) rm -f "$here/attached/$attachment" ;;
CHECK)
    has '"prevResult":{'
    [ -e "$here/attached/$attachment" ] || fail 3 "strict: $attachment is not attached"
    ;;
GC)
    [ "${STRICT_GC:-}" = nothing ] && exit
    for file in "$here/attached"/*; do
        name=$(basename "$file")
        case "$conf" in
        *"{\"containerID\":\"${name%%:*}\",\"ifname\":\"${name#*:}\"}"*) ;;
        *) rm -f "$file" ;;
        esac
    done
    ;;
esac
