// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// uninstallTwice installs Sluice on a machine with separate mount and network namespaces, whose directories only root
// may write, and uninstalls it twice. Its arguments are the directory of the programs, a directory for plugins and
// configurations, and a command that prepares the machine.
const uninstallTwice = `set -eu
mount -n -t tmpfs -o mode=0755 none /run
mount -n -t tmpfs -o mode=0755 none /var/lib
mount -n -t tmpfs -o mode=0755 none /var/log
mkdir -p /var/log/sluice-u
eval "$3"
flags="--plugin-directory=$2 --cni-directory=$2"
"$1/sluice" --instance u node install --plugin-directory="$2" >/dev/null
echo data >/var/lib/sluice-u/policy/policies.db
for run in first second third; do
	echo "run: $run"
	"$1/sluice" --instance u node uninstall --state $flags
	find /run /var/lib /var/log "$2" -mindepth 1 -path '*sluice*' -printf 'left: %p\n'
done
`

// TestUninstallSucceedsAgain runs the real programs. sluice-datapath drops its privileges before it reads its
// directory.
func TestUninstallSucceedsAgain(t *testing.T) {
	for name, c := range map[string]struct {
		prepare string
		left    []string
	}{
		"a directory": {":", nil},
		"a mount point": {
			"mkdir /var/lib/sluice-u && mount -n -t tmpfs -o mode=0755 none /var/lib/sluice-u",
			[]string{"/var/lib/sluice-u"},
		},
		"a mount point below": {
			"mkdir -p /var/lib/sluice-u/policy && mount -n -t tmpfs -o mode=0755 none /var/lib/sluice-u/policy",
			[]string{"/var/lib/sluice-u", "/var/lib/sluice-u/policy"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			bin, err := filepath.Abs(binDir())
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			out, err := exec.Command("unshare", "-mn", "sh", "-c", uninstallTwice, "sh", bin, dir, c.prepare).CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			runs := strings.Split(string(out), "run: ")[1:]
			if len(runs) != 3 || !strings.Contains(runs[0], dir+"/sluice-cni\n") {
				t.Fatalf("the runs printed\n%s", out)
			}
			for i, run := range runs {
				var left []string
				for line := range strings.Lines(run) {
					if path, ok := strings.CutPrefix(strings.TrimSpace(line), "left: "); ok {
						left = append(left, path)
					}
					if i > 0 && (strings.HasPrefix(line, "emptied") || strings.HasPrefix(line, "removed /")) {
						t.Errorf("run %d still says %s", i+1, line)
					}
				}
				if strings.Join(left, " ") != strings.Join(c.left, " ") {
					t.Errorf("after run %d there is %q, want %q", i+1, left, c.left)
				}
			}
		})
	}
}

// TestUninstallThatStaysAnswersProbes sends probes as kubelet does, in a separate network namespace: they fail until
// everything is removed, and then succeed until the end.
func TestUninstallThatStaysAnswersProbes(t *testing.T) {
	bin, err := filepath.Abs(binDir())
	if err != nil {
		t.Fatal(err)
	}
	const script = `set -eu
mount -n -t tmpfs -o mode=0755 none /run
mount -n -t tmpfs -o mode=0755 none /var/lib
ip link set lo up
"$1/sluice" --instance u node install --plugin-directory="$2" >/dev/null
"$1/sluice" --instance u node uninstall --state --stay --health-address=127.0.0.1:64708 \
	--plugin-directory="$2" --cni-directory="$2" >"$2/out" 2>&1 &
pid=$!
until exec 3<>/dev/tcp/127.0.0.1/64708; do kill -0 $pid; done 2>/dev/null
printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3
head -n 1 <&3
ls /run/sluice-u /var/lib/sluice-u 2>&1 || true
kill -TERM $pid
wait $pid
echo ended
`
	dir := t.TempDir()
	out, err := exec.Command("unshare", "-mn", "bash", "-c", script, "bash", bin, dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got := string(out); !strings.HasPrefix(got, "HTTP/1.0 200") || !strings.HasSuffix(got, "\nended\n") ||
		strings.Count(got, "No such file or directory") != 2 {
		t.Errorf("it printed\n%s", got)
	}
}
