_launch_complete() {
  local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" word="${COMP_WORDS[COMP_CWORD]}" prefix answer
  [[ $word == [=:] ]] && word=
  prefix="${line##*[[:space:]]}"
  prefix="${prefix%"$word"}"
  COMPREPLY=()
  while read -r answer; do
    COMPREPLY+=("${answer#"$prefix"}")
  done < <(COMP_LINE="$line" "${COMP_WORDS[0]}" -sc query=bash 2>/dev/null)
  if [[ ${#COMPREPLY[@]} != 1 || ${COMPREPLY[0]} == *[=./] ]]; then
    compopt -o nospace 2>/dev/null
  fi
}
if [ -n "${ZSH_VERSION-}" ]; then
  eval "$(launch -sc install=zsh)"
else
  complete -o default -F _launch_complete launch
fi
