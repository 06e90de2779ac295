#!/bin/sh
# `c++` as tests find it: the machine's own compiler, $TUNER_TESTS_CXX. More than half of its work
# for an exported file is PyTorch's headers, the same for nearly all: from the second file of a
# session on they are precompiled in $TUNER_TESTS_HEADERS and included first. The first is read as
# it stands, as all are where that fails: a run of few tests does not pay for it. Files with
# precompiled headers are compiled at -O1, as in `cpu_machine`: a quarter less, and tests of
# templates and of kinds of loops keep -O3. All are linked by gold where it is, in a third of the
# time: 0.6 s less of each.
headers=$TUNER_TESTS_HEADERS/begin.hpp
is_extension='' text=''
for word; do
    case $word in
    -DTORCH_EXTENSION_NAME=*) is_extension=yes ;;
    -ltorch_python) command -v ld.gold > /dev/null && set -- "$@" -fuse-ld=gold ;;
    *.cpp) text=$word ;;
    esac
done

precompile() {
    grep -E '^#include <(ATen|c10|torch)/' "$text" > "$headers" || return
    is_value=''
    for word; do # what is of this file alone is left out
        shift
        case $is_value$word in
        -o | -MF) is_value=yes ;;
        yes* | -c | -MMD | *.cpp | -DTORCH_EXTENSION_NAME=*) is_value='' ;;
        *) set -- "$@" "$word" ;;
        esac
    done
    "$TUNER_TESTS_CXX" "$@" -x c++-header "$headers" -o "$headers.half" &&
        mv "$headers.half" "$headers.gch"
}

if [ "$is_extension" ] && [ "$text" ]; then
    # A folder is made once, whoever else tries.
    if ! mkdir "$TUNER_TESTS_HEADERS" 2> /dev/null && mkdir "$headers.begun" 2> /dev/null; then
        precompile "$@"
    fi
    [ -e "$headers.gch" ] && set -- "$@" -include "$headers" -O1
fi
exec "$TUNER_TESTS_CXX" "$@"
