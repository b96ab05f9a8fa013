#!/bin/sh
# Puts real English prose into FOLDER: the Debian package `anarchism` (11 MB of
# text in 130 files, GPL-2+).  Its files are taken from where it is installed, or
# from the package itself (images that leave /usr/share/doc out lack them).
#   scripts/corpus.sh FOLDER
set -eu
folder=$1
installed=/usr/share/doc/anarchism/markdown
mkdir -p "$folder"
[ -n "$(find "$folder" -name '*.md.gz' -print -quit)" ] && exit 0

if [ -d "$installed" ]; then
  cp "$installed"/*.md.gz "$folder"/
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  (cd "$work" && apt-get download -qq anarchism && dpkg -x anarchism_*.deb tree)
  cp "$work/tree$installed"/*.md.gz "$folder"/
fi
echo "corpus: $(find "$folder" -name '*.md.gz' | wc -l) files in $folder"
