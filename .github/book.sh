#!/bin/sh
# Builds the book of docs/ in DIR with mdbook:
#
#     .github/book.sh DIR [URL]
#
# Pages link to files outside of docs/ with relative paths, which work in a checkout and on GitHub.
# The book does not have these files, so their links get URL, for example
# https://github.com/OWNER/REPOSITORY/blob/HEAD. The default is `repository` of Cargo.toml. Without
# both these links stay as they are. A warning of mdbook is an error.
set -eu
case $# in
1 | 2) ;;
*)
    echo "usage: book.sh DIR [URL]" >&2
    exit 2
    ;;
esac
mkdir -p "$1"
out=$(cd "$1" && pwd)
url=${2:-}
cd "$(dirname "$0")/.."
[ -n "$url" ] || url=$(sed -n 's,^repository = "\(.*\)",\1/blob/HEAD,p' Cargo.toml)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r docs "$work"
# This page is at the root of the repository, and in the book beside the pages of docs/.
sed 's,](\([.A-Z]\),](../\1,g; s,](docs/,](,g' ARCHITECTURE.md >"$work/ARCHITECTURE.md"
# mdbook renders README.md as index.html, but does not change the links to it.
mv "$work/docs/decisions/README.md" "$work/docs/decisions/index.md"
sed -i 's,](decisions/README\.md,](decisions/index.md,g' "$work/ARCHITECTURE.md" "$work"/docs/*.md
if [ -n "$url" ]; then
    sed -i "s,](\.\./,]($url/,g" "$work/ARCHITECTURE.md" "$work"/docs/*.md
    sed -i "s,](\.\./\.\./,]($url/,g" "$work"/docs/*/*.md
fi

mdbook build --dest-dir "$out" "$work/docs" 2>"$work/log" || {
    cat "$work/log" >&2
    exit 1
}
cat "$work/log" >&2
! grep -qE '(^|[^a-z])(WARN|ERROR)' "$work/log"
