function _launch_complete
  set -lx COMP_LINE (commandline -cp)
  set -l words (commandline -opc)
  set -l answers ($words[1] -sc query=fish 2>/dev/null)
  if set -q answers[1]
    printf '%s\n' $answers
  else
    __fish_complete_path (commandline -ct)
  end
end
complete -c launch -f -a '(_launch_complete)'
