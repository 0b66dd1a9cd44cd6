// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/confirmed"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

// documentedRoles returns the calls of etcdctl that the documentation names for a node.
func documentedRoles(t *testing.T, node string) (calls [][]string) {
	t.Helper()
	return documentedCalls(t, node, 0)
}

// documentedAssigner returns the calls of etcdctl that the documentation names for a node that writes assignments.
func documentedAssigner(t *testing.T, node string) (calls [][]string) {
	t.Helper()
	return documentedCalls(t, node, 1)
}

// documentedCalls returns the commands of the i-th example of roles.
func documentedCalls(t *testing.T, node string, i int) (calls [][]string) {
	t.Helper()
	doc, err := os.ReadFile("../../../../docs/identity.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(doc), "### A role for each node")
	examples := regexp.MustCompile("(?s)```\n(.*?)```").FindAllStringSubmatch(section, -1)
	if len(examples) <= i {
		t.Fatal("docs/identity.md has no example of roles")
	}
	script := "node=" + node + "\netcdctl() { echo \"$@\"; }\n" +
		strings.ReplaceAll(examples[i][1], "/sluice/v1/identity", testPrefix)
	out, err := exec.Command("bash", "-euc", script).Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		calls = append(calls, strings.Fields(line))
	}
	return calls
}

// TestGuidesGrantTheDocumentedRoles executes the scripts of the guides. They grant each node what docs/identity.md
// names, and write the keys that no node may write before etcd authenticates its users.
func TestGuidesGrantTheDocumentedRoles(t *testing.T) {
	for guide, nodes := range map[string][]string{
		"operations/install-host.md": {"a"}, "how-to/several-machines.md": {"a", "b"},
	} {
		var want []string
		for _, node := range nodes {
			for _, call := range documentedRoles(t, node) {
				want = append(want, strings.Join(call, " "))
			}
		}
		got, before := guideCalls(t, guide, nodes)
		if slices.Sort(want); !slices.Equal(got, slices.Compact(want)) {
			t.Errorf("%s grants\n%s\nand docs/identity.md\n%s", guide, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if layout := before[testPrefix+"/layout"]; layout != strconv.Itoa(layoutFinal) {
			t.Errorf("%s writes layout %q, want %d", guide, layout, layoutFinal)
		}
		var settings registry.IPAM
		if err := json.Unmarshal([]byte(before[testPrefix+"/ipam"]), &settings); err != nil ||
			!settings.Equal(registry.IPAM{Mode: registry.IPAMStatic}) {
			t.Errorf("%s writes ipam %q, want the settings of its nodes: %v", guide, before[testPrefix+"/ipam"], err)
		}
	}
}

// guideCalls returns the calls of etcdctl that a guide makes for nodes, sorted, without those for root, and the keys
// that it writes before it enables authentication.
func guideCalls(t *testing.T, guide string, nodes []string) (calls []string, before map[string]string) {
	t.Helper()
	doc, err := os.ReadFile("../../../../docs/" + guide)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := regexp.MustCompile(`(?sm)^\$ cat > /etc/etcd/([a-z-]+) <<'EOF'\n(.*?)^EOF$`)
	for _, m := range file.FindAllSubmatch(doc, -1) {
		text := strings.NewReplacer("/etc/etcd", dir, "/sluice/v1/identity", testPrefix).Replace(string(m[2]))
		if err := os.WriteFile(filepath.Join(dir, string(m[1])), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range map[string]string{
		"etcdctl": "IFS=\"\t\"; echo \"$*\"", "hostname": "echo " + nodes[0],
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	run := exec.Command("sh", append([]string{"-eu", filepath.Join(dir, "make-roles")}, nodes...)...)
	run.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", guide, err, out)
	}
	before = make(map[string]string)
	enabled := false
	for line := range strings.Lines(string(out)) {
		words := strings.Split(strings.TrimSpace(line), "\t")
		switch {
		case words[0] == "put" && !enabled && len(words) == 3:
			before[words[1]] = words[2]
		case strings.Join(words, " ") == "auth enable":
			enabled = true
		case slices.Contains(words, "root"):
		default:
			calls = append(calls, strings.Join(words, " "))
		}
	}
	if !enabled {
		t.Errorf("%s does not enable authentication", guide)
	}
	slices.Sort(calls)
	return calls, before
}

// etcdctl implements the part of the etcdctl command that the example uses.
func etcdctl(t *testing.T, c *clientv3.Client, words []string) {
	t.Helper()
	var err error
	ctx := t.Context()
	switch verb := strings.Join(words[:2], " "); verb {
	case "role add":
		_, err = c.RoleAdd(ctx, words[2])
		if errors.Is(err, rpctypes.ErrRoleAlreadyExist) {
			err = nil // of the previous node
		}
	case "role grant-permission":
		end, rest := "", words[3:]
		if rest[0] == "--prefix=true" {
			rest = rest[1:]
			end = clientv3.GetPrefixRangeEnd(rest[1])
		}
		kind, ok := map[string]clientv3.PermissionType{
			"read": clientv3.PermissionType(clientv3.PermRead), "readwrite": clientv3.PermissionType(clientv3.PermReadWrite),
		}[rest[0]]
		if !ok {
			t.Fatalf("etcdctl %q", words)
		}
		_, err = c.RoleGrantPermission(ctx, words[2], rest[1], end, kind)
	case "user add":
		_, err = c.UserAddWithOptions(ctx, words[2], "", &clientv3.UserAddOptions{NoPassword: true})
	case "user grant-role":
		_, err = c.UserGrantRole(ctx, words[2], words[3])
	default:
		t.Fatalf("etcdctl %q", words)
	}
	if err != nil {
		t.Fatalf("etcdctl %q: %v", words, err)
	}
}

// TestDocumentedRolesAreEnoughAndNoMore runs two nodes over TLS, each with the rights that the documentation gives it.
func TestDocumentedRolesAreEnoughAndNoMore(t *testing.T) {
	s := etcdtest.StartTLS(t)
	admin := s.As("root")
	etcdctl(t, admin, []string{"role", "add", "root"})
	etcdctl(t, admin, []string{"user", "add", "root"})
	etcdctl(t, admin, []string{"user", "grant-role", "root", "root"})
	for key, value := range map[string]string{"/layout": "2", "/ipam": `{"mode":"static"}`} { // which exist beforehand
		if _, err := admin.Put(t.Context(), testPrefix+key, value); err != nil {
			t.Fatal(err)
		}
	}
	nodes := map[string]*node{}
	for _, name := range []string{"a", "b"} {
		for _, call := range documentedRoles(t, name) {
			etcdctl(t, admin, call)
		}
	}
	if _, err := admin.AuthEnable(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"a", "b"} {
		cfg := quick()
		cert, key := s.Files(name)
		cfg.client = session.Client{CA: s.CA, Cert: cert, Key: key}
		n := startNode(t, s.Endpoint, name, t.TempDir(), cfg)
		n.connected()
		n.register(i, prefix(i))
		said := registry.Registration{IPAM: &registry.IPAM{Mode: registry.IPAMStatic}}
		if _, _, err := n.reg.Register(t.Context(), said, false); err != nil {
			t.Fatal(err)
		}
		n.endpoint("pod", "app-"+name, address(i, 5))
		n.published()
		nodes[name] = n
	}
	nodes["a"].seesNode("b", true)
	id := nodes["b"].endpoint("another", "app-a", address(1, 6))
	nodes["a"].seesMapping(address(1, 6), fmt.Sprint("b ", id.Number))

	// The collector publishes; without the grant, as in roles of before, it names it.
	led := nodes["a"]
	if ok, err := nodes["b"].store.Lead(t.Context()); err != nil {
		t.Fatal(err)
	} else if ok {
		led = nodes["b"]
	} else if ok, err := led.store.Lead(t.Context()); err != nil || !ok {
		t.Fatalf("no node collects: %v", err)
	}
	if err := led.store.PublishNumbers(t.Context(), allocator.Numbers{Used: 1}); err != nil {
		t.Errorf("with the documented role: %v", err)
	}
	confirms := NewConfirmed(led.session)
	if err := confirms.Publish(t.Context(), confirmed.Summary{Cluster: 1, Wanted: 1}); err != nil {
		t.Errorf("publish a summary with the documented role: %v", err)
	}
	if err := confirms.Report(t.Context(), confirmed.Report{Cluster: 1}); err != nil {
		t.Errorf("confirm with the documented role: %v", err)
	}
	// Assignments are written by the nodes with a grant of their own.
	put := []registry.AssignmentKey{{Node: "c", Assignment: registry.Assignment{Ranges: []netip.Prefix{prefix(9)}}}}
	err := NewNodes(nodes["a"].session).Assign(t.Context(), put, nil)
	if !errors.Is(err, confirmed.ErrDenied) || !strings.Contains(err.Error(), testPrefix+"/ip/.assigned/") {
		t.Errorf("assign without the grant: %v", err)
	}
	for _, call := range documentedAssigner(t, "b") {
		etcdctl(t, admin, call)
	}
	if err := NewNodes(nodes["b"].session).Assign(t.Context(), put, nil); err != nil {
		t.Errorf("assign with the documented role: %v", err)
	}
	own := testPrefix + "/report/" + led.session.Config().Node + "/"
	if _, err := admin.RoleRevokePermission(t.Context(), "sluice-"+led.session.Config().Node, own,
		clientv3.GetPrefixRangeEnd(own)); err != nil {
		t.Fatal(err)
	}
	if err := confirms.Report(t.Context(), confirmed.Report{Cluster: 1}); !errors.Is(err, confirmed.ErrDenied) ||
		!strings.Contains(err.Error(), own) {
		t.Errorf("confirm without the grant: %v", err)
	}
	if _, err := admin.RoleRevokePermission(t.Context(), "sluice", testPrefix+"/cluster/",
		clientv3.GetPrefixRangeEnd(testPrefix+"/cluster/")); err != nil {
		t.Fatal(err)
	}
	if err := led.store.PublishNumbers(t.Context(), allocator.Numbers{Used: 2}); !errors.Is(err, allocator.ErrDenied) ||
		!strings.Contains(err.Error(), testPrefix+"/cluster/") {
		t.Errorf("without the grant: %v", err)
	}
	err = confirms.Publish(t.Context(), confirmed.Summary{Cluster: 1, Wanted: 2})
	if !errors.Is(err, confirmed.ErrDenied) {
		t.Errorf("publish a summary without the grant: %v", err)
	}

	a := s.As("a")
	for _, key := range []string{
		"/ip/b/node", "/ip/b/ep/x", "/ip/b/range/ipv4-0", "/ip/b/rest/10.0.1.0_24", "/ref/b/300", "/alive/b",
		"/ip/.assigned/of/a", "/layout", "/ipam", "/other", "x",
	} {
		if _, err := a.Put(t.Context(), testPrefix+key, "x"); !errors.Is(err, rpctypes.ErrPermissionDenied) {
			t.Errorf("node a writes %s: %v", key, err)
		}
		if _, err := a.Delete(t.Context(), testPrefix+key); !errors.Is(err, rpctypes.ErrPermissionDenied) {
			t.Errorf("node a deletes %s: %v", key, err)
		}
	}
	attackWithoutRights(t, a, nodes["b"])
	if _, err := s.As("stranger").Get(t.Context(), testPrefix+"/ip/b/node"); err == nil {
		t.Error("a certificate without a user reads")
	}
}

// attackWithoutRights tries the ways past its role that versions of etcd had for a node: nested transactions, leases of
// other nodes, and compaction.
func attackWithoutRights(t *testing.T, attacker *clientv3.Client, other *node) {
	t.Helper()
	key := testPrefix + "/ip/b/node"
	for name, op := range map[string]clientv3.Op{
		"puts": clientv3.OpPut(key, "x"), "deletes": clientv3.OpDelete(key),
		"creates": clientv3.OpPut(testPrefix+"/ref/b/9", ""), "reads": clientv3.OpGet("/registry/secrets/"),
	} {
		nested := clientv3.OpTxn(nil, []clientv3.Op{op}, nil)
		for _, txn := range []clientv3.Txn{
			attacker.Txn(t.Context()).Then(nested), attacker.Txn(t.Context()).Else(nested),
			attacker.Txn(t.Context()).Then(clientv3.OpTxn(nil, []clientv3.Op{nested}, nil)),
			attacker.Txn(t.Context()).Then(clientv3.OpTxn(nil, nil, []clientv3.Op{op})),
		} {
			if _, err := txn.Commit(); !errors.Is(err, rpctypes.ErrPermissionDenied) {
				t.Errorf("node a %s keys of b in a nested transaction: %v", name, err)
			}
		}
	}
	lease, err := other.session.Lease()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := attacker.Revoke(t.Context(), lease); !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Errorf("node a revokes the lease of b: %v", err)
	}
	put := clientv3.OpPut(testPrefix+"/ref/a/9", "", clientv3.WithLease(lease))
	if _, err := attacker.Do(t.Context(), put); !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Errorf("node a attaches a key to the lease of b: %v", err)
	}
	if _, err := attacker.Txn(t.Context()).Then(put).Commit(); !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Errorf("node a attaches a key to the lease of b in a transaction: %v", err)
	}
	head, err := attacker.Get(t.Context(), testPrefix+"/layout")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := attacker.Compact(t.Context(), head.Header.Revision); !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Errorf("node a compacts: %v", err)
	}
}
