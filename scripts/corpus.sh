#!/bin/sh
# Puts real English text into FOLDER, from a Debian package that carries it:
#   scripts/corpus.sh FOLDER               prose: `anarchism`, 11 MB in 130 files, GPL-2+
#   scripts/corpus.sh FOLDER linux-doc     reference: the kernel's documentation, 24 MB in 3,200 files, GPL-2
# The files are taken from where the package is installed, or from the package
# itself (images that leave /usr/share/doc out lack them).
set -eu
folder=$1
case "${2:-anarchism}" in
  anarchism) package=anarchism inside=usr/share/doc/anarchism/markdown pattern='*.md.gz' ;;
  linux-doc)
    package=$(apt-cache depends linux-doc 2>/dev/null | sed -n 's/ *Depends: \(linux-doc-[0-9.]*\)/\1/p' | head -n 1)
    [ -n "$package" ] || { echo "corpus: apt knows no linux-doc here" >&2; exit 1; }
    inside=usr/share/doc/$package/html/_sources pattern='*.txt'
    ;;
  *) echo "usage: scripts/corpus.sh FOLDER [anarchism|linux-doc]" >&2; exit 64 ;;
esac
mkdir -p "$folder"
[ -n "$(find "$folder" -name "$pattern" -print -quit)" ] && exit 0

from=/$inside
if [ ! -d "$from" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  (cd "$work" && apt-get download -qq "$package" && dpkg -x "$package"_*.deb tree)
  from=$work/tree/$inside
fi
cp -R "$from/." "$folder/"
find "$folder" -type f ! -name "$pattern" -delete
echo "corpus: $(find "$folder" -name "$pattern" | wc -l) files in $folder"
