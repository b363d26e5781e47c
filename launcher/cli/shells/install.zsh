_launch_complete() {
  local -a answers
  answers=(${(f)"$(COMP_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" $words[1] -sc query=zsh 2>/dev/null)"})
  if (( ! $#answers )); then
    _files
    return
  fi
  compadd -S '' -- ${(M)answers:#*[=./]}
  compadd -- ${answers:#*[=./]}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i -D }
compdef _launch_complete launch
