// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// cnitool runs libcni's command line for one network and namespace. The network's name is the node's name, because
// libcni's cache is shared by the machine, and GC applies to everything that is cached for a network's name.
type cnitool struct {
	network string
	confDir string
	plugins string
}

func (c cnitool) run(ctx context.Context, verb, netns string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(binDir(), "tools", "cnitool"), verb, c.network, netns)
	cmd.Env = append(os.Environ(),
		"NETCONFPATH="+c.confDir, "CNI_PATH="+c.plugins, "CNI_IFNAME=eth0",
		`CAP_ARGS={"labels":[{"key":"app","value":"cnitool"}]}`)
	return cmd.CombinedOutput()
}

// keepCache removes libcni's cache directory at the end of the test if there was none before. cnitool has no option
// for another directory.
func keepCache(t *testing.T) {
	t.Helper()
	const results = "/var/lib/cni/results"
	for _, dir := range []string{filepath.Dir(results), results} {
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			// Cleanups run in reverse order, so the inner directory is removed first. If another copy of the test
			// still uses it, that copy removes it.
			t.Cleanup(func() { _ = os.Remove(dir) })
		}
	}
}

// hostAddress returns the node's address on the pods' side: the first usable address of the pod's IPv4 range.
func hostAddress(p pod.Pod) netip.Addr {
	return netip.PrefixFrom(p.IPv4, 24).Masked().Addr().Next()
}

// TestKernelLibcniSpeaksEveryVersionAndVerb runs the shim through libcni's cnitool, with each version of the
// specification and each of its verbs.
func TestKernelLibcniSpeaksEveryVersionAndVerb(t *testing.T) {
	t.Parallel()
	keepCache(t)
	n := newNode(t)
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			tool := cnitool{network: n.Instance(), confDir: t.TempDir(), plugins: filepath.Dir(n.Plugin())}
			list, err := cni.List(n.CNIConflist(), tool.network, version)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(tool.confDir, "10-sluice.conflist"), list, 0o600); err != nil {
				t.Fatal(err)
			}
			p, other := newPod(t, "cnitool"), newPod(t, "cnitool")
			must := func(verb string, p pod.Pod) []byte {
				t.Helper()
				out, err := tool.run(ctx, verb, p.Netns)
				if err != nil {
					t.Fatalf("cnitool %s: %v\n%s", verb, err, out)
				}
				return out
			}
			result := must("add", p)
			var parsed struct {
				Version string `json:"cniVersion"`
			}
			if err := json.Unmarshal(result, &parsed); err != nil || parsed.Version != version {
				t.Errorf("result has version %q (%v), want %q:\n%s", parsed.Version, err, version, result)
			}
			a := withAddresses(t, p, result)
			b := withAddresses(t, other, must("add", other))
			exchange(t, a, b)
			if version != "0.3.1" {
				must("check", p)
			}
			if version == "1.1.0" {
				must("status", p)
			}
			must("del", p)
			must("del", p)
			if version != "0.3.1" {
				if out, err := tool.run(ctx, "check", p.Netns); err == nil {
					t.Errorf("cnitool check after del succeeded: %s", out)
				}
			}
			if version == "1.1.0" {
				// cnitool passes no list of valid attachments, although the specification requires one. The shim must
				// not collect anything then.
				out, err := tool.run(ctx, "gc", p.Netns)
				if err == nil || !strings.Contains(string(out), "cni.dev/valid-attachments") {
					t.Errorf("cnitool gc: %v, want an error about cni.dev/valid-attachments:\n%s", err, out)
				}
			}
			must("del", other)
		})
	}
	n.wantNothingHeld(t)
}

// TestKernelLibcniCollectsWhatIsNotValid proves that GC removes attachments that the runtime does not list, even if
// they are not in libcni's cache, and keeps the listed ones.
func TestKernelLibcniCollectsWhatIsNotValid(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	config, err := cni.List(n.CNIConflist(), n.Instance(), "1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	list, err := libcni.ConfListFromBytes(config)
	if err != nil {
		t.Fatal(err)
	}
	plugins := []string{filepath.Dir(n.Plugin())}
	connect := func(prefix string) pod.Pod {
		t.Helper()
		p := newPod(t, prefix)
		// The collecting runtime has an empty cache of its own.
		result, err := libcni.NewCNIConfigWithCacheDir(plugins, t.TempDir(), nil).AddNetworkList(ctx, list,
			&libcni.RuntimeConf{ContainerID: p.Name, NetNS: p.Netns, IfName: "eth0"})
		if err != nil {
			t.Fatalf("ADD %s: %v", p.Name, err)
		}
		encoded, err := json.Marshal(result)
		if err != nil {
			t.Fatal(err)
		}
		return withAddresses(t, p, encoded)
	}
	kept, stale := connect("kept"), connect("stale")
	exchange(t, kept, stale)

	runtime := libcni.NewCNIConfigWithCacheDir(plugins, t.TempDir(), nil)
	valid := []types.GCAttachment{{ContainerID: kept.Name, IfName: "eth0"}}
	if err := runtime.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: valid}); err != nil {
		t.Fatalf("GC: %v", err)
	}
	n.wantOnly(t, []pod.Pod{kept})
	if _, _, err := kept.Ping(ctx, hostAddress(kept)); err != nil {
		t.Errorf("after GC the valid pod lost its network: %v", err)
	}
	if err := runtime.GCNetworkList(ctx, list, &libcni.GCArgs{}); err != nil {
		t.Fatalf("GC of all: %v", err)
	}
	n.wantNothingHeld(t)
}
