// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/privilege/privilegetest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// rules are the restrictions under which a service manager starts a daemon.
type rules struct {
	uid, gid          uint32
	bounding, ambient []string
	permitted         []string // and effective
	noNewPrivs        bool
	writable          []string // below the node's directories; nil for all of them
}

// inContainer restarts the node's datapath in a container of runc, with the rules, in the node's network namespace
// and with the node's directories.
func (n *testNode) inContainer(t *testing.T, r rules) {
	t.Helper()
	pid, err := n.PID(devnode.Datapath)
	if err != nil {
		t.Fatal(err)
	}
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		t.Fatal(err)
	}
	args := strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
	if err := n.Stop(t.Context(), devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	bundle := t.TempDir()
	program := filepath.Join(bundle, "rootfs", "sluice-datapath")
	if err := os.Mkdir(filepath.Dir(program), 0o755); err != nil {
		t.Fatal(err)
	}
	copyProgram(t, args[0], program)
	args[0] = "/sluice-datapath"
	bind := func(path string, options ...string) map[string]any {
		return map[string]any{
			"destination": path, "type": "bind", "source": path,
			"options": append([]string{"rbind", "rslave"}, options...),
		}
	}
	mounts := []any{
		map[string]any{"destination": "/proc", "type": "proc", "source": "proc"},
		bind("/sys", "ro"), bind("/run/netns", "ro"),
	}
	mode := "rw"
	if r.writable != nil {
		mode = "ro"
	}
	mounts = append(mounts, bind(n.Paths().RunDir, mode), bind(n.Paths().StateDir, mode))
	for _, path := range r.writable {
		mounts = append(mounts, bind(path, "rw"))
	}
	spec := map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"user": map[string]any{"uid": r.uid, "gid": r.gid, "additionalGids": []uint32{r.gid}},
			"args": args, "cwd": "/", "env": []string{}, "noNewPrivileges": r.noNewPrivs,
			"capabilities": map[string]any{
				"bounding": r.bounding, "effective": r.permitted, "permitted": r.permitted, "inheritable": r.ambient,
				"ambient": r.ambient,
			},
		},
		"root":   map[string]any{"path": "rootfs", "readonly": true},
		"mounts": mounts,
		"linux": map[string]any{
			"cgroupsPath": "/sluice-" + n.Instance(),
			"namespaces":  []any{map[string]any{"type": "mount"}, map[string]any{"type": "network", "path": n.Netns()}},
		},
	}
	config, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.OpenFile(n.Log(devnode.Datapath), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	root, id := filepath.Join(bundle, "state"), "sluice-"+n.Instance()
	t.Cleanup(func() {
		if out, err := exec.Command("runc", "--root", root, "delete", "--force", id).CombinedOutput(); err != nil { //nolint:gosec // arguments of the test's own
			t.Errorf("remove the container: %v: %s", err, out)
		}
	})
	run := exec.CommandContext(t.Context(), "runc", "--root", root, "run", "--detach", "--bundle", bundle, id) //nolint:gosec // arguments of the test's own
	run.Stdout, run.Stderr = log, log
	if err := run.Run(); err != nil {
		content, _ := os.ReadFile(log.Name())
		t.Fatalf("run the container: %v; the log ends with\n%s", err, content[max(0, len(content)-2000):])
	}
	servicetest.EventuallyNil(t, "the datapath serves in the container", func() error {
		ctx, cancel := deadline(t)
		defer cancel()
		return n.Serving(ctx, devnode.Datapath)
	})
}

func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}

// fromUnit reads the rules of a systemd unit, with the directories of the node.
func fromUnit(t *testing.T, n *testNode, unit string) rules {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("..", "..", "deploy", "systemd", unit))
	if err != nil {
		t.Fatal(err)
	}
	has := map[string]string{}
	for line := range strings.Lines(string(content)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			has[k] = v
		}
	}
	for key, value := range map[string]string{
		"NoNewPrivileges": "yes", "ProtectSystem": "strict",
		"SupplementaryGroups": "65700",
	} {
		if has[key] != value {
			t.Errorf("%s: %s is %q, want %q", unit, key, has[key], value)
		}
	}
	r := rules{
		bounding: strings.Fields(has["CapabilityBoundingSet"]), ambient: strings.Fields(has["AmbientCapabilities"]),
		permitted: strings.Fields(has["AmbientCapabilities"]), noNewPrivs: true,
	}
	if _, err := fmt.Sscan(has["User"]+" "+has["Group"], &r.uid, &r.gid); err != nil {
		t.Fatalf("%s: user and group: %v", unit, err)
	}
	for _, path := range strings.Fields(has["ReadWritePaths"]) {
		path = strings.Replace(path, "/run/sluice", n.Paths().RunDir, 1)
		r.writable = append(r.writable, strings.Replace(path, "/var/lib/sluice", n.Paths().StateDir, 1))
	}
	return r
}

// TestKernelDatapathServesInAContainer: the datapath is started as root with its capabilities and the right to change
// the user, or in its systemd unit. It then runs as its own user with only its capabilities, and connects pods.
func TestKernelDatapathServesInAContainer(t *testing.T) {
	t.Parallel()
	six := []string{"CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"}
	for _, c := range []struct {
		name     string
		rules    func(*testing.T, *testNode) rules
		bounding string
	}{
		{"as root", func(*testing.T, *testNode) rules { return rules{bounding: six, permitted: six} }, "000000c0002010c0"},
		{"by the rules of its unit", func(t *testing.T,
			n *testNode,
		) rules {
			return fromUnit(t, n, "sluice-datapath.service")
		}, "000000c000201000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			// Before the container starts: if the machine's mounts are private, the container does not see later
			// mounts.
			pods := []pod.Pod{newPod(t, "web"), newPod(t, "client")}
			n.inContainer(t, c.rules(t, n))
			pid, err := n.PID(devnode.Datapath)
			if err != nil {
				t.Fatal(err)
			}
			for _, have := range privilegetest.Threads(t, pid) {
				for key, value := range map[string]string{
					"Uid": "65706\t65706\t65706\t65706", "Gid": "65700\t65700\t65700\t65700", "Groups": "65700",
					"CapPrm": "000000c000201000", "CapEff": "000000c000201000", "CapBnd": c.bounding,
					"CapInh": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2",
				} {
					if have[key] != value {
						t.Errorf("thread %s: %s is %q, want %q", have["Pid"], key, have[key], value)
					}
				}
			}
			for i, p := range pods {
				pods[i] = n.add(t, p, n.config(t, "1.0.0", labels("app", "x")))
			}
			exchange(t, pods[0], pods[1])
			for _, p := range pods {
				n.del(t, p)
			}
			n.wantNothingHeld(t)
		})
	}
}
