// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	statuscommand "github.com/sluice-net/sluice/cmd/sluice/internal/status"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestConfirmEndsWhatTheKernelHolds(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	n.Policy.Held = []string{"datapath: the kernel goes on enforcing revision 12: the policy service began another state"}
	n.Policy.WaitError = status.Error(codes.FailedPrecondition, "an earlier state stays enforced: "+n.Policy.Held[0])
	out, _ := n.Want(t, invocation.ExitNotReady, "policy", "apply", "-f", file)
	if !strings.Contains(out, "Revision 7 is stored, but the kernel does not enforce it: an earlier state stays "+
		"enforced: datapath: the kernel goes on enforcing revision 12") {
		t.Errorf("apply says\n%s", out)
	}
	for _, flag := range []string{"--validate-only", "--dry-run"} {
		out, _ = n.Want(t, 0, "policy", "confirm", flag)
		nodetest.WantLines(t, out, "Before: "+n.Policy.Held[0],
			"Nothing was changed: --dry-run. Revision 7 with 1 policy would be enforced.")
	}
	if n.Policy.WaitError == nil {
		t.Error("--dry-run confirmed the policies")
	}
	out, _ = n.Want(t, 0, "policy", "confirm")
	for _, want := range []string{
		"Before: datapath: the kernel goes on enforcing revision 12",
		"The kernel enforces revision 7 with ",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("confirm says\n%s, want %q", out, want)
		}
	}
	n.Policy.Held, n.Policy.Confirmed = nil, status.Error(codes.FailedPrecondition, "incomplete: identity")
	out, _ = n.Want(t, invocation.ExitNotReady, "policy", "confirm")
	if !strings.Contains(out, "there was nothing to confirm") || !strings.Contains(out,
		"Revision 7 is confirmed, but the kernel does not enforce it: incomplete: identity") {
		t.Errorf("confirm says\n%s", out)
	}
}

func TestApplyWaitsUntilTheKernelEnforces(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	out, _ := n.Want(t, 0, "policy", "apply", "-f", file)
	nodetest.WantLines(t, out, "NetworkPolicy shop/web created")
	if !strings.Contains(out, "The kernel enforces revision 7, after ") {
		t.Errorf("apply says\n%s", out)
	}
	out, _ = n.Want(t, 0, "policy", "apply", "-f", file, "--wait=false", "-o", "json")
	var done struct {
		Enforced *bool
		Changes  []struct{ Type, File string }
	}
	if err := json.Unmarshal([]byte(out), &done); err != nil {
		t.Fatal(err)
	}
	if done.Enforced != nil || len(done.Changes) != 1 || done.Changes[0].Type != "unchanged" ||
		done.Changes[0].File != file {
		t.Errorf("apply --wait=false: %+v", done)
	}
	out, _ = n.Want(t, 0, "policy", "apply", "-f", file, "--dry-run")
	nodetest.WantLines(t, out, "Nothing was changed: --dry-run.")

	for _, c := range []struct {
		what string
		set  func()
		want string
	}{
		{"an unavailable datapath", func() { n.Policy.Disconnected = []string{"datapath"} }, "not connected: datapath"},
		{"no datapath at all", func() {
			// A subscriber that only watches, for example in a debugging session, does not program a kernel.
			n.Policy.Enforcing, n.Policy.Subscribers = nil, []*policyv1.SubscriberStatus{{Name: "nc-sub", Connected: true}}
		}, "no datapath is connected"},
		{"a refused table", func() {
			n.Policy.WaitError = status.Error(codes.FailedPrecondition,
				"identity 300: table of NetworkPolicy shop/web: 9 of 8 rows")
		}, "9 of 8 rows"},
		{"a slow kernel", func() { n.Policy.WaitError = status.Error(codes.DeadlineExceeded, "") }, "timed out after 50ms"},
	} {
		n.Policy.Mu.Lock()
		n.Policy.Disconnected, n.Policy.WaitError, n.Policy.Enforcing = nil, nil, []string{"datapath"}
		c.set()
		n.Policy.Mu.Unlock()
		wait := "1m" // the service answers at once
		if status.Code(n.Policy.WaitError) == codes.DeadlineExceeded {
			wait = "50ms"
		}
		out, _ = n.Want(t, invocation.ExitNotReady, "policy", "apply", "-f", file, "--wait="+wait)
		if !strings.Contains(out, c.want) || !strings.Contains(out, "does not enforce it") {
			t.Errorf("with %s, apply says\n%s", c.what, out)
		}
	}
}

func TestProblemsNameFileDocumentAndField(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	good := nodetest.Write(t, dir, "a.yaml", "# a comment alone\n---\n"+nodetest.WebPolicy)
	bad := nodetest.Write(t, dir, "b.yaml", nodetest.WebPolicy+
		"---\n# nothing\n---\nkind: NetworkPolicy\nmetadata: {name: db}\nspec: {refuse: \"is no port\"}\n")
	_, errOut := n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", good, "-f", bad)
	nodetest.WantLines(t, errOut, "sluice: "+bad+": document 2 (line 8): NetworkPolicy db: spec.refuse: is no port")
	if len(n.Policy.Policies) != 0 {
		t.Errorf("something was applied: %v", n.Policy.Policies)
	}

	dropped := nodetest.Write(t, dir, "c.yaml",
		"kind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\nspec: {unknown: x}\n")
	_, errOut = n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", dropped)
	nodetest.WantLines(t, errOut, "sluice: "+dropped+
		": document 1 (line 1): NetworkPolicy shop/web: spec.unknown: no such field")
	_, errOut = n.Want(t, 0, "policy", "apply", "-f", dropped, "--allow-unknown-fields")
	nodetest.WantLines(t, errOut, "warning: "+dropped+
		": document 1 (line 1): NetworkPolicy shop/web: spec.unknown: no such field; it is ignored")

	for name, content := range map[string]string{
		"syntax.yaml":  "kind: NetworkPolicy\n---\n\nmetadata: name: x\n",
		"empty.yaml":   "# nothing\n---\n",
		"two.json":     `{"kind": "NetworkPolicy"}` + "\n" + `{"kind": "NetworkPolicy"}`,
		"large.yaml":   "kind: NetworkPolicy\n#" + strings.Repeat("x", manifest.MaxBytes),
		"trailing.yml": "kind: A\n...\nkind: [\n",
	} {
		path := nodetest.Write(t, dir, name, content)
		_, errOut := n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", path)
		if !strings.HasPrefix(errOut, "sluice: "+path+": ") {
			t.Errorf("%s: standard error %q", name, errOut)
		}
		if name == "syntax.yaml" && !strings.Contains(errOut, "line 4") {
			t.Errorf("the message does not give the file's line: %q", errOut)
		}
	}
	_, errOut = n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", filepath.Join(dir, "absent"))
	if !strings.Contains(errOut, "absent: no such file or directory") {
		t.Errorf("an absent file: %q", errOut)
	}
	n.Want(t, invocation.ExitUsage, "policy", "apply")
}

// TestFieldsWithoutEffectAreNotes: a field that affects no verdict is neither converted nor reported as a warning.
func TestFieldsWithoutEffectAreNotes(t *testing.T) {
	without := &policyv1.PolicyNote{
		Kind: policyv1.PolicyNoteKind_POLICY_NOTE_KIND_NO_EFFECT, Field: "spec.log", Text: "has no effect",
	}
	converted := &policyv1.PolicyNote{
		Kind: policyv1.PolicyNoteKind_POLICY_NOTE_KIND_UNSUPPORTED, Field: "spec.x", Text: "not supported",
	}
	p := &policyv1.Policy{Accepted: true, Notes: []*policyv1.PolicyNote{without, converted}}
	if got := stateText(p); got != "accepted, 1 field converted, 1 note" {
		t.Errorf("the state is %q", got)
	}
	if noteLabel(without) != "note: " || noteLabel(converted) != "warning: " {
		t.Errorf("labels are %q and %q", noteLabel(without), noteLabel(converted))
	}
}

func TestUnsupportedFieldsStayInSight(t *testing.T) {
	n := nodetest.New(t, Command, statuscommand.Command)
	file := nodetest.Write(t, t.TempDir(), "a.yaml",
		"kind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\nspec: {unsupported: such peers}\n")
	const text = "NetworkPolicy shop/web: spec.unsupported: not supported by Sluice: such peers"
	_, errOut := n.Want(t, 0, "policy", "apply", "-f", file)
	nodetest.WantLines(t, errOut, "warning: "+file+": document 1 (line 1): "+text)
	out, _ := n.Want(t, 0, "policy", "list")
	nodetest.WantLines(t, out, "NetworkPolicy shop/web accepted, 1 field converted 7 1 identity 2 3h0m0s grpc", text)
	out, _ = n.Want(t, 0, "policy", "list", "-o", "json")
	var all message.Items[*policyv1.Policy]
	if err := nodetest.UnmarshalItems(out, &all); err != nil || len(all) != 1 || len(all[0].GetNotes()) != 1 ||
		all[0].GetNotes()[0].GetKind() != policyv1.PolicyNoteKind_POLICY_NOTE_KIND_UNSUPPORTED {
		t.Errorf("list -o json: %v, %s", err, out)
	}
	_, errOut = n.Want(t, 0, "policy", "get", "netpol", "shop/web")
	nodetest.WantLines(t, errOut, "warning: spec.unsupported: not supported by Sluice: such peers")
	n.Policy.Mu.Lock()
	n.Policy.Policies["NetworkPolicy shop/web"].OmittedNoteCount = 12
	n.Policy.Mu.Unlock()
	out, _ = n.Want(t, 0, "policy", "list")
	nodetest.WantLines(t, out, text, "NetworkPolicy shop/web: 12 more notes are left out")
	n.Policy.Mu.Lock()
	n.Policy.Unsupported = 1
	n.Policy.Mu.Unlock()
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Warning: sluice-policy: policies with fields that Sluice does not support: 1; see "+
		"`sluice policy list`")
}

func TestListsAndOtherKindsAreRead(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	list := nodetest.Write(t, dir, "list.yaml",
		"apiVersion: v1\nkind: List\nitems:\n- apiVersion: networking.k8s.io/v1\n  kind: NetworkPolicy\n  metadata: "+
			"{name: a, namespace: shop}\n"+
			"- {apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: b, namespace: shop}, spec: "+
			"{refuse: is no port}}\n")
	_, errOut := n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", list)
	nodetest.WantLines(t, errOut, "sluice: "+list+
		": document 1, item 2 (line 7): NetworkPolicy shop/b: spec.refuse: is no port")
	typed := nodetest.Write(t, dir, "typed.json",
		`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicyList", `+
			`"items": [{"metadata": {"name": "c", "namespace": "shop"}}]}`)
	out, _ := n.Want(t, 0, "policy", "apply", "-f", typed)
	nodetest.WantLines(t, out, "NetworkPolicy shop/c created")

	mixed := nodetest.Write(t, dir, "mixed.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n---\n"+
		nodetest.WebPolicy+"---\napiVersion: crd.projectcalico.org/v1\nkind: NetworkPolicy\nmetadata: {name: x}\n")
	out, errOut = n.Want(t, 0, "policy", "apply", "-f", mixed, "--skip-other-kinds")
	nodetest.WantLines(t, out, "NetworkPolicy shop/web created")
	nodetest.WantLines(t, errOut, "note: "+mixed+": document 1 (line 1): Service s: is not a policy; skipped",
		"note: "+mixed+": document 3 (line 10): NetworkPolicy x: is not a policy; skipped")
	none := nodetest.Write(t, dir, "none.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n")
	_, errOut = n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", none, "--skip-other-kinds")
	nodetest.WantLines(t, errOut, "sluice: no policy found among the objects")
}

func TestBrokenFilesHideNoOthers(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	nodetest.Write(t, dir, "a.yaml", "{")
	nodetest.Write(t, dir, "b.yaml", nodetest.WebPolicy)
	nodetest.Write(t, dir, "c.yaml", "kind: [\n")
	_, errOut := n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", dir)
	for _, name := range []string{"a.yaml", "c.yaml"} {
		if !strings.Contains(errOut, filepath.Join(dir, name)+": ") {
			t.Errorf("apply does not name %s: %q", name, errOut)
		}
	}
	if len(n.Policy.Policies) > 0 {
		t.Error("the other file was applied")
	}
	var failure struct{ Error string }
	_, errOut = n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", dir, "-o", "json")
	if err := json.Unmarshal([]byte(errOut), &failure); err != nil || !strings.Contains(failure.Error, "a.yaml") {
		t.Errorf("apply -o json: %v: %q", err, errOut)
	}
	_, errOut = n.Want(t, invocation.ExitUsage, "policy", "apply", "-o", "json")
	if err := json.Unmarshal([]byte(errOut), &failure); err != nil ||
		!strings.Contains(failure.Error, "nothing to apply") {
		t.Errorf("wrong usage with -o json: %v: %q", err, errOut)
	}

	bin := t.TempDir()
	script := "#!/bin/sh\n/bin/cat > /dev/null\necho '{\"problems\":[]}'\n"
	if err := os.WriteFile(filepath.Join(bin, "sluice-policy"), []byte(script), 0o700); err != nil { //nolint:gosec // executable
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	out, _ := n.Want(t, invocation.ExitFailed, "policy", "validate", "-f", dir)
	if !strings.Contains(out, filepath.Join(dir, "a.yaml")+": ") ||
		!strings.Contains(out, filepath.Join(dir, "c.yaml")+": ") ||
		!strings.Contains(out, "0 of 1 policies would be refused; files that cannot be read: 2.") {
		t.Errorf("validate says\n%s", out)
	}
	out, _ = n.Want(t, invocation.ExitFailed, "policy", "validate", "-f", dir, "-o", "json")
	var all []checked
	if err := nodetest.UnmarshalItems(out, &all); err != nil || len(all) != 3 || all[0].Name != "web" ||
		len(all[0].Problems) != 0 || len(all[2].Problems) != 1 {
		t.Errorf("validate -o json: %v, %s", err, out)
	}
}

func TestApplyAsAManager(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	a := nodetest.Write(t, dir, "a.yaml", "kind: NetworkPolicy\nmetadata: {name: a, namespace: shop}\n")
	b := nodetest.Write(t, dir, "b.yaml", "kind: NetworkPolicy\nmetadata: {name: b, namespace: shop}\n")
	n.Want(t, 0, "policy", "apply", "-f", a, "-f", b, "--manager", "argo", "--expect-revision", "6")
	out, _ := n.Want(t, 0, "policy", "list")
	nodetest.WantLines(t, out, "NetworkPolicy shop/a accepted 7 1 identity 2 3h0m0s grpc:argo")
	_, errOut := n.Want(t, invocation.ExitFailed,
		"policy", "apply", "-f", a, "--manager", "argo", "--expect-revision", "6")
	nodetest.WantLines(t, errOut, "sluice: the policy revision is another")
	out, _ = n.Want(t, 0, "policy", "apply", "-f", b, "--manager", "argo", "--prune")
	nodetest.WantLines(t, out, "NetworkPolicy shop/b unchanged", "NetworkPolicy shop/a deleted")
	_, errOut = n.Want(t, invocation.ExitUsage, "policy", "apply", "-f", b, "--prune")
	nodetest.WantLines(t, errOut,
		"sluice: --prune deletes the other policies of a program: name the program with --manager NAME")
}

func TestPolicyThatSelectsNothingIsNoted(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Policy.SelectsNothing = true
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	_, errOut := n.Want(t, 0, "policy", "apply", "-f", file)
	nodetest.WantLines(t, errOut, "note: "+file+
		": document 1 (line 1): NetworkPolicy shop/web: selects no endpoint of this node")
	// The list shows it in a column.
	out, _ := n.Want(t, 0, "policy", "list")
	nodetest.WantLines(t, out, "NetworkPolicy shop/web accepted 7 1 identity 2 3h0m0s grpc")
}

func TestApplyTakesDirectoriesAndStandardInput(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	nodetest.Write(t, dir, "b.yml", "kind: NetworkPolicy\nmetadata: {name: b}\n")
	nodetest.Write(t, dir, "a.json", `{"kind": "NetworkPolicy", "metadata": {"name": "a"}}`)
	nodetest.Write(t, dir, "notes.txt", "{")
	nodetest.Write(t, dir, ".hidden.yaml", "{")
	if err := os.Mkdir(filepath.Join(dir, "sub.yaml"), 0o700); err != nil {
		t.Fatal(err)
	}
	out, _ := n.Want(t, 0, "policy", "apply", "-f", dir, "-n", "shop")
	if got := strings.Join(strings.Fields(out)[:6],
		" "); got != "NetworkPolicy shop/a created NetworkPolicy shop/b created" {
		t.Errorf("apply says\n%s", out)
	}
	docs, err := manifest.Read([]string{"-"}, strings.NewReader(nodetest.WebPolicy))
	if err != nil || len(docs) != 1 || docs[0].Place() != "standard input: document 1 (line 1)" ||
		string(manifest.Join(docs)) != "---\n"+nodetest.WebPolicy {
		t.Errorf("standard input: %+v, %v", docs, err)
	}
	if _, err := manifest.Read([]string{"-"}, strings.NewReader("{")); err == nil ||
		!strings.HasPrefix(err.Error(), "standard input: document 1 (line 1): yaml: ") {
		t.Errorf("no YAML on standard input: %v", err)
	}
	if _, err := manifest.Read([]string{t.TempDir()}, nil); err == nil ||
		!strings.Contains(err.Error(), "no .yaml, .yml or .json file") {
		t.Errorf("an empty directory: %v", err)
	}
}

func TestPoliciesAreNamedAsPeopleDo(t *testing.T) {
	for _, c := range []struct{ kind, name, namespace, want string }{
		{"NetworkPolicy", "web", "", "NetworkPolicy default/web"},
		{"netpol", "shop/web", "", "NetworkPolicy shop/web"},
		{"networkpolicies", "web", "shop", "NetworkPolicy shop/web"},
		{"CNP", "web", "shop", "CiliumNetworkPolicy shop/web"},
		{"ccnp", "all", "shop", "CiliumClusterwideNetworkPolicy all"},
		{"banp", "default", "", "BaselineAdminNetworkPolicy default"},
		{"ccnp", "shop/all", "", ""},
		{"pod", "web", "", ""},
		{"netpol", "", "", ""},
		{"netpol", "/web", "", ""},
		{"netpol", "a/b/c", "", ""},
	} {
		key, err := policykind.KeyNamed(c.kind, c.name, c.namespace)
		if (err == nil) != (c.want != "") || err == nil && policykind.KeyText(key) != c.want {
			t.Errorf("%s %q in %q: %v, %v, want %q", c.kind, c.name, c.namespace, policykind.KeyText(key), err, c.want)
		}
	}
}

// TestPoliciesAreNamedInOneWay: get, delete and diff --delete accept the same two forms.
func TestPoliciesAreNamedInOneWay(t *testing.T) {
	for args, want := range map[string]string{
		"netpol shop/web web": "[NetworkPolicy shop/web NetworkPolicy default/web]",
		"netpol/shop/web":     "[NetworkPolicy shop/web]", "ccnp/all netpol/x": "[CiliumClusterwideNetworkPolicy all " +
			"NetworkPolicy default/x]",
		"": "[]", "netpol": "", "netpol/shop/web x": "", "netpol/": "", "pod/x": "", "ccnp/shop/all": "",
	} {
		keys, err := policykind.KeysNamed(strings.Fields(args), "")
		texts := []string{}
		for _, k := range keys {
			texts = append(texts, policykind.KeyText(k))
		}
		if (err == nil) != (want != "") || err == nil && fmt.Sprint(texts) != want {
			t.Errorf("%q: %v, %v, want %s", args, texts, err, want)
		}
	}
	n := nodetest.New(t, Command)
	n.Want(t, 0, "policy", "apply", "-f", nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy))
	one, _ := n.Want(t, 0, "policy", "get", "netpol", "shop/web")
	if other, _ := n.Want(t, 0, "policy", "get", "netpol/shop/web"); other != one {
		t.Errorf("got\n%s\nwant\n%s", other, one)
	}
	n.Want(t, invocation.ExitUsage, "policy", "get")
	n.Want(t, 0, "policy", "delete", "netpol/shop/web")
}

func TestDeleteListAndGet(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	n.Want(t, 0, "policy", "apply", "-f", file)
	n.Policy.Mu.Lock()
	n.Policy.Policies["NetworkPolicy shop/x"] = &policyv1.Policy{
		Key: &policyv1.PolicyKey{Kind: "NetworkPolicy", Namespace: "shop", Name: "x"}, Source: "file", Origin: "x.yaml",
		Error: "spec.ingress: is a number", Accepted: true, Revision: 2,
	}
	n.Policy.Policies["z"] = &policyv1.Policy{
		Key: &policyv1.PolicyKey{}, Source: "file", Origin: "z.yaml",
		Error: "is no YAML",
	}
	n.Policy.Mu.Unlock()

	out, _ := n.Want(t, 0, "policy", "list")
	nodetest.WantLines(t, out, "POLICY STATE REVISION SELECTS RULES AGE SOURCE",
		"NetworkPolicy shop/web accepted 7 1 identity 2 3h0m0s grpc",
		"NetworkPolicy shop/x outdated 2 0 identities 0 - file:x.yaml", "file:z.yaml refused 0 0 identities 0 - file:z.yaml",
		"file:z.yaml was refused: is no YAML",
		"NetworkPolicy shop/x keeps its previous version; the new version was refused: spec.ingress: is a number")
	out, _ = n.Want(t, 0, "policy", "list", "--subject", "300", "-o", "json")
	var all message.Items[*policyv1.Policy]
	if err := nodetest.UnmarshalItems(out, &all); err != nil || len(all) != 1 || all[0].GetKey().GetName() != "web" {
		t.Errorf("list --subject 300: %v %s", err, out)
	}
	out, _ = n.Want(t, 0, "policy", "list", "--refused")
	if strings.Contains(out, "shop/web") || !strings.Contains(out, "z.yaml") {
		t.Errorf("list --refused\n%s", out)
	}

	out, _ = n.Want(t, 0, "policy", "get", "netpol", "shop/web")
	if out != nodetest.WebPolicy {
		t.Errorf("get gives\n%s", out)
	}
	_, errOut := n.Want(t, invocation.ExitFailed, "policy", "get", "netpol", "web")
	nodetest.WantLines(t, errOut, "sluice: no NetworkPolicy default/web; see `sluice policy list`")

	out, _ = n.Want(t, 0, "policy", "delete", "netpol", "shop/web", "nope")
	nodetest.WantLines(t, out, "NetworkPolicy shop/web deleted", "NetworkPolicy default/nope absent")
	out, _ = n.Want(t, 0, "policy", "delete", "-f", file)
	nodetest.WantLines(t, out, "NetworkPolicy shop/web absent")
	for _, bad := range [][]string{{}, {"netpol"}, {"netpol", "a", "-f", file}, {"pod", "a"}} {
		n.Want(t, invocation.ExitUsage, append([]string{"policy", "delete"}, bad...)...)
	}
}

func TestPolicyExplainFindsWhoIsMeant(t *testing.T) {
	n := nodetest.New(t, Command)
	type want struct {
		identity uint32
		address  string
		labels   int
	}
	for _, c := range []struct {
		text string
		want want
	}{
		{"0123", want{300, "10.244.0.2", 0}},
		{"0123456789ab/eth0", want{300, "10.244.0.2", 0}},
		{"10.244.0.3", want{300, "10.244.0.3", 0}},
		{"300", want{300, "", 0}},
		{"10.244.1.2", want{301, "10.244.1.2", 0}}, // a pod of another node
		{"10.244.1.9", want{uint32(identity.UnknownInCluster), "10.244.1.9", 0}},
		{"192.0.2.2", want{uint32(identity.RemoteNode), "192.0.2.2", 0}},
		{"192.0.2.7", want{uint32(identity.KubeAPIServer), "192.0.2.7", 0}},
		{"203.0.113.9", want{0, "203.0.113.9", 0}}, // outside
		{"10.244.0.1", want{uint32(identity.Host), "10.244.0.1", 0}},
		{"10.244.0.99", want{uint32(identity.UnknownInCluster), "10.244.0.99", 0}},
		{"k8s:app=web,tier", want{300, "", 2}}, // exactly
		{"app=web", want{300, "", 1}},          // a subset of one identity's labels
		{"app=new", want{0, "", 1}},
		{"reserved:host", want{1, "", 0}},
	} {
		n.Want(t, 0, "policy", "explain", "--from", c.text, "--to", "301", "--port", "80")
		from := n.Policy.Explained.GetFrom()
		got := want{from.GetIdentity(), from.GetAddress(), len(from.GetLabels())}
		if got != c.want {
			t.Errorf("--from %s: the request has %+v, want %+v", c.text, got, c.want)
		}
	}
	n.Want(t, 0, "policy", "explain", "--from", "0123", "--to", "fd00:244::9", "--icmp", "echo")
	r := n.Policy.Explained
	if r.GetFrom().GetAddress() != "fd00:244::2" || r.GetProtocol() != 58 || r.GetPort() != 128<<8 {
		t.Errorf("IPv6 is asked as %v", r)
	}
	n.Want(t, 0, "policy", "explain", "--from", "300", "--to", "301", "--port", "53/UDP")
	if r := n.Policy.Explained; r.GetProtocol() != 17 || r.GetPort() != 53 {
		t.Errorf("53/UDP is asked as %v", r)
	}
	for _, bad := range [][]string{
		{"--from", "0123", "--to", "301"},
		{"--from", "0123", "--port", "80"},
		{"--from", "", "--to", "301", "--port", "80"},
		{"--from", "0123", "--to", "301", "--port", "0"},
		{"--from", "0123", "--to", "301", "--port", "80/gre"},
		{"--from", "0123", "--to", "301", "--protocol", "6"},
		{"--from", "0123", "--to", "301", "--icmp", "300"},
		{"--from", "0123", "--to", "301", "--port", "80", "--icmp", "8"},
		{"--from", "k8s:=x", "--to", "301", "--port", "80"},
		{"--from", "reserved:nobody", "--to", "301", "--port", "80"},
		{"--from", "a=b,a=c", "--to", "301", "--port", "80"},
		{"--from", "127.0.0.1", "--to", "301", "--port", "80"},
		{"--from", "300", "--to", "ff02::1", "--port", "80"},
		{"--from", "fe80::1%eth0", "--to", "301", "--port", "80"},
		{"-n", "shop", "--from", "a=b,io.kubernetes.pod.namespace=other", "--to", "301", "--port", "80"},
		{"--from", "16777216", "--to", "301", "--port", "80"},
		{"--from", "192.0.2.7", "--to", "fd00::1", "--port", "80"},
		{"--from", "192.0.2.7", "--to", "192.0.2.8", "--port", "80", "-6"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"policy", "explain"}, bad...)...)
	}
	_, errOut := n.Want(t, invocation.ExitFailed, "policy", "explain", "--from", "300", "--to", "999", "--port", "80")
	nodetest.WantLines(t, errOut, "sluice: identity 999 is not known")
	_, errOut = n.Want(t, invocation.ExitFailed, "policy", "explain", "--from", "300", "--to", "a.example",
		"--port", "80")
	nodetest.WantLines(t, errOut, "sluice: no container or pod a.example; see `sluice endpoint list`; "+
		"DNS names are not accepted; give an address")
}

// TestPolicyExplainFindsLabelsAmongTheIdentitiesOfTheCluster: the labels resolve to one identity; if no single identity
// matches, a note reports it.
func TestPolicyExplainFindsLabelsAmongTheIdentitiesOfTheCluster(t *testing.T) {
	n := nodetest.New(t, Command)
	namespace := func(name string) []*workloadv1.Label {
		return []*workloadv1.Label{
			nodetest.Label("io.kubernetes.pod.namespace", name),
			nodetest.Label("io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name", name),
		}
	}
	n.Identity.More = [][]*workloadv1.Label{
		append(namespace("shop"), nodetest.Label("app", "client")),
		append(namespace("shop"), nodetest.Label("app", "cart"), nodetest.Label("version", "1"),
			&workloadv1.Label{Source: "generated", Key: "named-ports", Value: "http.TCP.80"}),
		append(namespace("blog"), nodetest.Label("app", "cart"), nodetest.Label("version", "2")),
	}
	for _, c := range []struct {
		labels, note string
		identity     uint32
		given        int
		flags        []string
	}{
		{"app=client", "app=client is the identity shop/app=client (302), the only one with these labels", 302, 1, nil},
		{"app=client", "", 302, 3, []string{"-n", "shop"}},
		{"app=client,io.kubernetes.pod.namespace=shop", "", 302, 3, nil},
		{"app=cart", "2 identities of the cluster have the labels app=cart among others; they are evaluated as given; " +
			"nearest: shop/app=cart,version=1 (303)", 0, 1, nil},
		{
			"app=cart", "app=cart is the identity blog/app=cart,version=2 (304), the only one with these labels", 304, 3,
			[]string{"--namespace", "blog"},
		},
		{"app=client", "no identity of the cluster has exactly the labels app=client; they are evaluated as given; " +
			"nearest: blog/app=cart,version=2 (304)", 0, 3, []string{"-n", "blog"}},
		{"app=absent", "no identity of the cluster has any of the labels app=absent; they are evaluated as given", 0, 1, nil},
	} {
		out, _ := n.Want(t, 0, append([]string{
			"policy", "explain", "--from", c.labels, "--to", "301", "--port", "80",
			"-o", "wide",
		}, c.flags...)...)
		from := n.Policy.Explained.GetFrom()
		if from.GetIdentity() != c.identity || len(from.GetLabels()) != c.given {
			t.Errorf("%s %v: the request has %v, want identity %d, %d labels", c.labels, c.flags, from, c.identity, c.given)
		}
		if note := "Note: " + c.note + "\n"; strings.Contains(out, "Note: ") != (c.note != "") || c.note != "" &&
			!strings.Contains(out, note) {
			t.Errorf("%s %v: want the note %q in\n%s", c.labels, c.flags, c.note, out)
		}
	}
	n.Stop("identity")
	_, errOut := n.Want(t, invocation.ExitFailed, "policy", "explain", "--from", "app=client", "--to", "301", "--port",
		"80")
	if !strings.Contains(errOut, "cannot find the identities with the labels app=client") {
		t.Errorf("while sluice-identity is unavailable: %s", errOut)
	}
	_, errOut = n.Want(t, invocation.ExitFailed, "policy", "explain", "--from", "203.0.113.9", "--to", "301", "--port",
		"80")
	if !strings.Contains(errOut, "cannot find the identity of 203.0.113.9") {
		t.Errorf("while sluice-identity is unavailable: %s", errOut)
	}
}

// TestPolicyExplainNamesTheNodesThatItDidNotAsk: the first line lists the nodes that were not evaluated.
func TestPolicyExplainNamesTheNodesThatItDidNotAsk(t *testing.T) {
	n := nodetest.New(t, Command)
	for _, c := range []struct{ from, to, suffix string }{
		{"10.244.1.2", "0123", "; node-b, which has the sender, was not asked"}, // denied by this node's side
		{"0123", "10.244.1.2", "; node-b, which has the receiver, was not asked"},
		{"10.244.1.2", "10.244.1.3", "; node-b, which has the sender and receiver, was not asked"},
		{"0123", "192.0.2.2", ""},
		{"0123", "10.244.0.3", ""},
		{"0123", "10.244.1.9", ""},
	} {
		out, _ := n.Want(t, 0, "policy", "explain", "--from", c.from, "--to", c.to, "--port", "80", "-o", "wide")
		line, _, _ := strings.Cut(out, "\n")
		suffix := c.suffix
		if c.to == "0123" {
			suffix = "" // a denial by this node is final
		}
		if !strings.HasSuffix(line, "DENIED by policy revision 6"+suffix) {
			t.Errorf("%s -> %s: %s, want it to end with %q", c.from, c.to, line, suffix)
		}
	}
}

// TestPolicyExplainRefusesAddressesOfServices: such an address is translated before policies are evaluated, so it has
// no verdict.
func TestPolicyExplainRefusesAddressesOfServices(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Explained = map[string]*datapathv1.ExplainResponse{
		"10.96.0.10": {Service: &datapathv1.ExplainedService{
			Service: "shop/web:http", Outcome: datapathv1.ServiceOutcome_SERVICE_OUTCOME_TRANSLATED, BackendCount: 3,
			Backends: []*datapathv1.ExplainedBackend{{Address: "10.244.0.3", Port: 8080}, {Address: "10.244.1.2", Port: 8080}},
		}},
		"10.96.0.11": {Service: &datapathv1.ExplainedService{Outcome: datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_PORT}},
		"10.96.0.12": {Service: &datapathv1.ExplainedService{
			Service: "shop/db", Outcome: datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_BACKEND,
		}},
		"203.0.113.9": {Service: &datapathv1.ExplainedService{
			Service: "shop/web", Outcome: datapathv1.ServiceOutcome_SERVICE_OUTCOME_NOT_TRANSLATED,
		}},
	}
	for address, want := range map[string]string{
		"10.96.0.10": "10.96.0.10, tcp port 80, is an address of Service shop/web, and policies see its backends: give " +
			"one of the backends (10.244.0.3:8080, 10.244.1.2:8080 and 1 more), or use `sluice explain`",
		"10.96.0.11": "10.96.0.11 is an address of a Service that does not serve tcp port 80: the connection is refused " +
			"before policies are evaluated",
		"10.96.0.12": "10.96.0.12, tcp port 80, is an address of Service shop/db, and policies see its backends, but it " +
			"has none; `sluice explain` shows what happens to the connection",
	} {
		_, errOut := n.Want(t, invocation.ExitFailed, "policy", "explain", "--from", "0123", "--to", address, "--port", "80")
		nodetest.WantLines(t, errOut, "sluice: "+want)
	}
	n.Want(t, 0, "policy", "explain", "--from", "0123", "--to", "203.0.113.9", "--port", "80")
	n.Want(t, 0, "policy", "explain", "--from", "0123", "--to", "10.96.0.10", "--icmp", "echo")
	// Without a sender's address, the datapath cannot evaluate a packet, so the frontends are listed instead.
	n.Frontends = []*datapathv1.KernelFrontend{{
		Address: "10.96.0.20", Port: 80, Protocol: netv1.Protocol_PROTOCOL_TCP, Service: "shop/web:http",
		Inside: &datapathv1.KernelBackendList{Backends: []*datapathv1.KernelBackend{{Address: "10.244.0.3", Port: 8080}}},
	}}
	_, errOut := n.Want(t, invocation.ExitFailed, "policy", "explain", "--from", "300", "--to", "10.96.0.20", "--port",
		"80")
	nodetest.WantLines(t, errOut, "sluice: 10.96.0.20, tcp port 80, is an address of Service shop/web, and policies see "+
		"its backends: give one of the backends (10.244.0.3:8080), or use `sluice explain`")
	_, errOut = n.Want(t, invocation.ExitFailed, "policy", "explain", "--from", "300", "--to", "10.96.0.20", "--port",
		"81")
	if !strings.Contains(errOut, "does not serve tcp port 81") {
		t.Errorf("another port: %s", errOut)
	}
}

// TestExplainOfARedirectSaysThatItIsDropped, as `sluice explain` does, unless it is DNS over UDP or TCP.
func TestExplainOfARedirectSaysThatItIsDropped(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "policy", "explain", "--from", "300", "--to", "301", "--port", "8080", "-o", "wide")
	want := ": REDIRECTED by policy revision 6, and DROPPED (no-proxy): no proxy evaluates such packets\n"
	if !strings.Contains(out, want) {
		t.Errorf("policy explain\n%s", out)
	}
	const evaluated = ", to sluice-dns, which evaluates the query; DROPPED (no-proxy) if sluice-dns never ran, " +
		"or without the setting dns.proxy "
	for protocol, want := range map[string]string{
		"udp": evaluated, "tcp": evaluated, "sctp": ", and DROPPED (no-proxy): no proxy evaluates such packets ",
	} {
		out, _ := n.Want(t, 0, "policy", "explain", "--from", "300", "--to", "301", "--port", "53/"+protocol)
		if !strings.Contains(strings.Join(strings.Fields(out), " "), ": REDIRECTED by policy revision 6"+want) {
			t.Errorf("policy explain of DNS over %s\n%s", protocol, out)
		}
	}
}

func TestPolicyExplainShowsBothSidesAndEveryRule(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "policy", "explain", "--from", "0123", "--to", "301", "--port", "80")
	nodetest.WantLines(t, out,
		"0123456789abc/eth0 10.244.0.2 -> 301, tcp port 80: DENIED by policy revision 6",
		"Egress, what app=web (300) may send: allowed, because no policy selects it",
		`Ingress, what app=db\x1b[2J (301) may receive: denied by rule 2`,
		"> 2 deny isolation NetworkPolicy shop/db everything from everybody")
	out, _ = n.Want(t, 0, "policy", "explain", "--from", "0123", "--to", "301", "--port", "80", "-o", "json")
	x := &policyv1.ExplainResponse{}
	if err := message.Unmarshal([]byte(out), x); err != nil {
		t.Fatal(err)
	}
	if m := x.GetIngress().GetMatches()[0]; x.GetVerdict() != policyv1.Action_ACTION_DENY ||
		x.GetIngress().GetRule() != 2 || !m.GetDecides() || m.GetSources()[0].GetName() != "db" {
		t.Errorf("JSON %s", out)
	}
}

// TestDiffSaysWhichPeersNoEndpointHas: the policy service does not know the addresses of identities of other nodes or
// without endpoints.
func TestDiffSaysWhichPeersNoEndpointHas(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	peer := func(number uint32, app, prefix string) *policyv1.DiffPeer {
		return &policyv1.DiffPeer{Identity: number, Labels: []*workloadv1.Label{nodetest.Label("app", app)}, Prefix: prefix}
	}
	n.Policy.Differences = []*policyv1.DiffResponse{{
		Subject: 300, Direction: netv1.Direction_DIRECTION_INGRESS,
		Peers: []*policyv1.DiffPeer{
			peer(301, "here", "10.244.0.7/32"), peer(302, "one", ""), peer(303, "two", ""), peer(304, "ghost", ""),
			peer(1<<16, "local", ""),
			{Identity: 1, Labels: []*workloadv1.Label{{Source: "reserved", Key: "host"}}},
		},
		Ports: []*policyv1.DiffPorts{{
			LastProtocol: 65535, LastPort: 65535, Before: policyv1.Action_ACTION_ALLOW, After: policyv1.Action_ACTION_DENY,
		}},
	}}
	n.Cluster.Listed = []*identityv1.IPMapping{
		{Prefix: "10.244.1.2/32", Identity: 302},
		{Prefix: "10.244.1.3/32", Identity: 303},
		{Prefix: "fd00:244:1::3/128", Identity: 303},
	}
	out, _ := n.Want(t, exitDiffers, "policy", "diff", "-f", file)
	nodetest.WantLines(t, out, "from app=here (301) at 10.244.0.7", "from app=one (302) at one address of the cluster",
		"from app=two (303) at 2 addresses of the cluster", "from app=ghost (304), which no endpoint has at present",
		"from app=local (65536)", "from reserved:host")
	out, _ = n.Want(t, exitDiffers, "policy", "diff", "-f", file, "-o", "json")
	var all []struct {
		Peers []struct{ AddressCount *int }
	}
	if err := nodetest.UnmarshalItems(out, &all); err != nil || *all[0].Peers[3].AddressCount != 0 ||
		*all[0].Peers[2].AddressCount != 2 || all[0].Peers[0].AddressCount != nil ||
		all[0].Peers[4].AddressCount != nil {
		t.Errorf("%v: %s", err, out)
	}

	n.Identity.StoreError = "away"
	out, _ = n.Want(t, exitDiffers, "policy", "diff", "-f", file)
	nodetest.WantLines(t, out, "from app=ghost (304)")
	n.Stop("identity")
	out, errOut := n.Want(t, exitDiffers, "policy", "diff", "-f", file)
	nodetest.WantLines(t, out, "from app=ghost (304)")
	if errOut != "" {
		t.Errorf("without identity: %s", errOut)
	}
}

func TestDiffExitsAsDiffDoes(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	out, _ := n.Want(t, 0, "policy", "diff", "-f", file)
	nodetest.WantLines(t, out, "No verdict would change for the pods of this node.")
	n.Policy.Mu.Lock()
	n.Policy.Subjects = 0
	n.Policy.Mu.Unlock()
	_, errOut := n.Want(t, 0, "policy", "diff", "-f", file)
	if !strings.HasPrefix(errOut, "warning: the policy service knows no pod of this node") {
		t.Errorf("without a subject, standard error says %q", errOut)
	}

	n.Policy.Differences = []*policyv1.DiffResponse{{
		Subject: 300, SubjectLabels: []*workloadv1.Label{nodetest.Label("app", "web")},
		Direction: netv1.Direction_DIRECTION_INGRESS,
		Peers: []*policyv1.DiffPeer{
			{Identity: 301, Labels: []*workloadv1.Label{nodetest.Label("app", "client")}, Prefix: "0.0.0.0/0"},
			{Identity: 301, Labels: []*workloadv1.Label{nodetest.Label("app", "client")}, Prefix: "::/0"},
			{Identity: 302, Prefix: "::/0"},
			{Identity: 302, Prefix: "10.0.0.7/32"},
			{Prefix: "192.0.2.0/24"},
			{Identity: 1, Labels: []*workloadv1.Label{{Source: "reserved", Key: "host"}}},
			{},
		},
		Ports: []*policyv1.DiffPorts{
			{
				FirstProtocol: 0, FirstPort: 0, LastProtocol: 6, LastPort: 79, Before: policyv1.Action_ACTION_ALLOW,
				After: policyv1.Action_ACTION_DENY,
			},
			{
				FirstProtocol: 6, FirstPort: 80, LastProtocol: 6, LastPort: 80, Before: policyv1.Action_ACTION_ALLOW,
				After: policyv1.Action_ACTION_REDIRECT,
			},
			{
				FirstProtocol: 6, FirstPort: 81, LastProtocol: 65535, LastPort: 65535, Before: policyv1.Action_ACTION_ALLOW,
				After: policyv1.Action_ACTION_DENY,
			},
		},
	}}
	// The same for other peers, one of which was already listed.
	n.Policy.Differences = append(n.Policy.Differences, proto.Clone(n.Policy.Differences[0]).(*policyv1.DiffResponse))
	n.Policy.Differences[1].Peers = []*policyv1.DiffPeer{
		{Identity: 301, Labels: []*workloadv1.Label{nodetest.Label("app", "client")}},
		{Identity: 7, Labels: []*workloadv1.Label{{Source: "reserved", Key: "a"}, {Source: "reserved", Key: "b"}}},
	}
	out, _ = n.Want(t, exitDiffers, "policy", "diff", "-f", file, "--delete", "NetworkPolicy/shop/old", "--delete",
		"ccnp/all")
	nodetest.WantLines(t, out, "What app=web (300) may receive", "everything but tcp 80: allowed -> denied",
		"tcp 80: allowed -> redirected",
		"from app=client (301), which no endpoint has at present",
		"from identity 302 at ::/0, 10.0.0.7", "from reserved:host, reserved:a+reserved:b",
		"from 192.0.2.0/24, every other address outside")
	if strings.Count(out, "What ") != 1 {
		t.Errorf("a subject and direction is listed more than once:\n%s", out)
	}
	if d := n.Policy.Compared.GetDelete(); len(d) != 2 || policykind.KeyText(d[0]) != "NetworkPolicy shop/old" ||
		policykind.KeyText(d[1]) != "CiliumClusterwideNetworkPolicy all" {
		t.Errorf("deletions %v", d)
	}
	out, _ = n.Want(t, exitDiffers, "policy", "diff", "-f", file, "-o", "json")
	var all message.Items[*policyv1.DiffResponse]
	if err := nodetest.UnmarshalItems(out, &all); err != nil || len(all) != 1 || len(all[0].GetPorts()) != 3 {
		t.Errorf("JSON %v %s", err, out)
	}

	trouble := nodetest.Write(t, t.TempDir(), "trouble.yaml", "kind: X\nspec: {refuse: x}\n")
	n.Want(t, exitTrouble, "policy", "diff", "-f", trouble)
	n.Want(t, exitTrouble, "policy", "diff", "-f", "absent.yaml")
	n.Want(t, exitTrouble, "policy", "diff")
	n.Want(t, exitTrouble, "policy", "diff", "--delete", "web")
	n.Want(t, exitTrouble, "policy", "diff", "--nonsense")
}

func TestPolicyTableShowsRangesAndWhatLiesBetween(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Policy.Table = &policyv1.GetPolicyTableResponse{
		Revision: 9,
		Ingress: &policyv1.PolicyTable{
			HostAllow: true, HasAddresses: true,
			Rules: []*policyv1.TableRule{
				{Action: policyv1.Action_ACTION_ALLOW, Tier: policyv1.Tier_TIER_NORMAL},
				{Action: policyv1.Action_ACTION_DENY, Tier: policyv1.Tier_TIER_ISOLATION},
			},
			Classes: []*policyv1.PeerClass{
				{Ranges: []*policyv1.PortRange{{First: 0, Last: 0xFFFFFFFF, Rest: 2}}},
				{Ranges: []*policyv1.PortRange{
					{First: ports.Point(6, 80), Last: ports.Point(6, 80), Rest: 1},
					{First: ports.Point(6, 81), Last: ports.Point(6, 65535), Admin: 3, Rest: 1},
				}},
			},
			DefaultClasses: []*policyv1.KindClass{{Kind: policyv1.PeerKind_PEER_KIND_HOST, Class: 1}},
			AddressClasses: []*policyv1.ScopeClass{{Scope: policyv1.PeerScope_PEER_SCOPE_OUTSIDE, Class: 1}},
			Peers:          []*policyv1.PeerRow{{IdentityClass: 5, Class: 1}},
			Prefixes: []*policyv1.PrefixClasses{{Prefix: "192.0.2.0/24", Classes: []*policyv1.ScopeClass{
				{Scope: policyv1.PeerScope_PEER_SCOPE_OUTSIDE, Class: 1}, {Scope: policyv1.PeerScope_PEER_SCOPE_CLUSTER},
			}}},
		},
		IngressRules: []*policyv1.RuleSources{{Sources: []*policyv1.RuleSource{{
			Kind: "NetworkPolicy", Namespace: "shop",
			Name: "web", Path: "spec.ingress[0]",
		}}}},
	}
	out, _ := n.Want(t, 0, "policy", "table", "300")
	nodetest.WantLines(t, out, "Identity 300, policy revision 9", "Egress: no policy is enforced",
		"Ingress: connections that match no rule are denied, except for the local node",
		"rule 1 allow normal NetworkPolicy shop/web spec.ingress[0]", "rule 2 deny isolation -",
		"class 0 everything rule 2", "tcp 80 rule 1", "tcp 81-65535 rule 3, else rule 1", "identity class 5 class 1",
		"192.0.2.0/24 cluster: class 0, outside: class 1",
		"other peers, host class 1", "other addresses, outside class 1")
	n.Policy.Table.OmittedIngressRuleCount = 1
	out, _ = n.Want(t, 0, "policy", "table", "300")
	nodetest.WantLines(t, out, "The source locations of the last 1 of 2 rules are left out.")
	if first := strings.Index(out, "class 1"); !strings.Contains(out[first:], "default") {
		t.Errorf("ports without a rule are not shown as decided by default:\n%s", out)
	}
}

func TestValidateNeedsNoService(t *testing.T) {
	var out, errOut bytes.Buffer
	t.Setenv("PATH", t.TempDir())
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	if code := invocation.Run([]string{"--run-dir", "/nonexistent", "policy", "validate", "-f", file}, &out, &errOut,
		Command); code != invocation.ExitFailed ||
		!strings.Contains(errOut.String(), "sluice-policy, which checks manifests, is neither ") {
		t.Errorf("without the program: exit code %d\n%s%s", code, out.String(), errOut.String())
	}
	// A fake of the program.
	bin := t.TempDir()
	program := filepath.Join(bin, "sluice-policy")
	script := "#!/bin/sh\n[ \"$*\" = 'validate --namespace=shop' ] || exit 2\n/bin/cat > " + filepath.Join(bin, "stdin") +
		"\n" +
		`echo '{"problems":["spec.ingress[0].ports[0].port: is no port"]}'` + "\n" +
		`echo '{"problems":["metadata.name: another document has the same kind and name"],"droppedFields":["spec.x"]}'` + "\n"
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil { //nolint:gosec // executable
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	out.Reset()
	errOut.Reset()
	if code := invocation.Run([]string{"policy", "validate", "-n", "shop", "-f", file, "-f", file}, &out, &errOut,
		Command); code != invocation.ExitFailed {
		t.Errorf("with two wrong documents: exit code %d\n%s%s", code, out.String(), errOut.String())
	}
	place := file + ": document 1 (line 1): NetworkPolicy shop/web: "
	nodetest.WantLines(t, out.String(), place+"spec.ingress[0].ports[0].port: is no port",
		place+"metadata.name: another document has the same kind and name",
		place+"warning: spec.x: no such field; it would be ignored", "2 of 2 policies would be refused.")
	if given, err := os.ReadFile(filepath.Join(bin, "stdin")); err != nil || string(given) != "---\n"+nodetest.WebPolicy+
		"---\n"+nodetest.WebPolicy {
		t.Errorf("the program was given %q, %v", given, err)
	}
	if code := invocation.Run([]string{"policy", "validate", "-f", file}, &out, &errOut,
		Command); code != invocation.ExitFailed {
		t.Errorf("a program of another mind: exit code %d", code)
	}
}

// TestValidatePassesSettings: the flags reach the program that checks.
func TestValidatePassesSettings(t *testing.T) {
	bin := t.TempDir()
	const script = "#!/bin/sh\n/bin/cat > /dev/null\n" +
		"[ \"$*\" = 'validate --namespace= --allow-unknown-fields --cluster-node-labels --dns-proxy=false' ] || exit 2\n" +
		"echo '{\"problems\":[]}'\n"
	program := filepath.Join(bin, "sluice-policy")
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil { //nolint:gosec // executable
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	args := []string{
		"policy", "validate", "-f", file, "--cluster-node-labels", "--dns-proxy=false", "--allow-unknown-fields",
	}
	var out, errOut bytes.Buffer
	if code := invocation.Run(args, &out, &errOut, Command); code != 0 {
		t.Errorf("exit code %d\n%s%s", code, out.String(), errOut.String())
	}
}

// TestNamesWithoutDNSRuleFailWithStrict: they are a warning by default, and DNS rules of the node count with
// --against-node.
func TestNamesWithoutDNSRuleFailWithStrict(t *testing.T) {
	n := nodetest.New(t, Command)
	bin := t.TempDir()
	const note = `{"kind":"no-dns-rule","field":"spec.unsupported","text":"no DNS rule selects these pods"}`
	script := "#!/bin/sh\n/bin/cat > /dev/null\necho '{\"problems\":[]}\n{\"problems\":[],\"notes\":[" + note + "]}'\n"
	program := filepath.Join(bin, "sluice-policy")
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil { //nolint:gosec // executable
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	file := nodetest.Write(t, t.TempDir(), "a.yaml", nodetest.WebPolicy+
		"---\nkind: NetworkPolicy\nmetadata: {name: names, namespace: shop}\nspec: {unsupported: names}\n")
	line := func(out string) string {
		for l := range strings.Lines(out) {
			if strings.Contains(l, "no DNS rule") {
				return l
			}
		}
		return ""
	}
	for _, c := range []struct {
		args    []string
		ofNode  bool // no DNS rule of the node selects the pods either
		code    int
		label   string
		summary string
	}{
		{nil, true, 0, "warning: ", "All 2 policies would be accepted."},
		{[]string{"--strict"}, true, invocation.ExitFailed, "error: ", "All 2 policies would be accepted."},
		{[]string{"--strict", "--against-node"}, true, invocation.ExitFailed, "error: ", "All 2 policies would be accepted."},
		{[]string{"--strict", "--against-node"}, false, 0, "", "All 2 policies would be accepted."},
	} {
		n.Policy.Mu.Lock()
		n.Policy.NoDNSRule = c.ofNode
		n.Policy.Mu.Unlock()
		out, _ := n.Want(t, c.code, append([]string{"policy", "validate", "-f", file}, c.args...)...)
		got := line(out)
		if c.label == "" && got != "" ||
			c.label != "" && !(strings.Contains(got, c.label) && strings.Contains(got, "shop/names")) ||
			!strings.Contains(out, c.summary) {
			t.Errorf("%v: printed\n%swant the label %q, and %q", c.args, out, c.label, c.summary)
		}
	}
	if len(n.Policy.Policies) > 0 {
		t.Error("--against-node has changed the policies of the node")
	}
	n.Policy.NoDNSRule = true
	_, errOut := n.Want(t, 0, "policy", "apply", "-f", file)
	if !strings.Contains(errOut, "warning: "+file+": document 2") || line(errOut) == "" {
		t.Errorf("apply prints\n%s", errOut)
	}
}

// TestValidateCountsPoliciesThatAllowLess: without --strict, the exit code is 0 for them, so the summary must not hide
// them.
func TestValidateCountsPoliciesThatAllowLess(t *testing.T) {
	const (
		plain       = `{"problems":[]}`
		refused     = `{"problems":["spec: is wrong"]}`
		unsupported = `{"problems":[],"notes":[` +
			`{"kind":"unsupported","field":"spec.a","text":"x"},{"kind":"unsupported","field":"spec.b","text":"x"}]}`
		harmless = `{"problems":[],"notes":[{"kind":"no-effect","field":"spec.log","text":"x"}]}`
		why      = ", because of unsupported fields."
	)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	for _, c := range []struct {
		verdicts []string
		code     int
		want     string
	}{
		{[]string{unsupported}, 0, "NetworkPolicy shop/web would be accepted; it allows less than it says" + why},
		{[]string{harmless}, 0, "NetworkPolicy shop/web would be accepted."},
		{[]string{plain, unsupported}, 0, "All 2 policies would be accepted; 1 allows less than it says" + why},
		{
			[]string{unsupported, harmless, unsupported},
			0,
			"All 3 policies would be accepted; 2 allow less than they say" + why,
		},
		{
			[]string{refused, unsupported, plain},
			invocation.ExitFailed,
			"1 of 3 policies would be refused; 1 allows less than it says" + why,
		},
	} {
		bin := t.TempDir()
		script := "#!/bin/sh\n/bin/cat > /dev/null\necho '" + strings.Join(c.verdicts, "\n") + "'\n"
		program := filepath.Join(bin, "sluice-policy")
		if err := os.WriteFile(program, []byte(script), 0o700); err != nil { //nolint:gosec // executable
			t.Fatal(err)
		}
		t.Setenv("PATH", bin)
		args := []string{"policy", "validate"}
		for range c.verdicts {
			args = append(args, "-f", file)
		}
		var out, errOut bytes.Buffer
		code := invocation.Run(args, &out, &errOut, Command)
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if code != c.code || lines[len(lines)-1] != c.want {
			t.Errorf("exit code %d, %s%s\nwant %d, %s", code, out.String(), errOut.String(), c.code, c.want)
		}
		strict := invocation.ExitFailed
		if !slices.Contains(c.verdicts, unsupported) {
			strict = 0
		}
		out.Reset()
		code = invocation.Run(append(args, "--strict"), &out, &errOut, Command)
		if code != strict || strings.Contains(out.String(), "error: spec.a: x") != (strict != 0) {
			t.Errorf("--strict: exit code %d, %s", code, out.String())
		}
	}
}

// listed is the output of the fake `sluice-policy fields`.
var listed = strings.ReplaceAll(`
{HEAD,"path":"spec","type":"object","required":true,"support":"enforced","about":"All."}
{HEAD,"path":"spec.ingress","type":"list of object","support":"enforced","about":"Rules."}
{HEAD,"path":"spec.ingress.nodes","type":"object","support":"enforced","setting":"cluster.nodeLabels","about":"Nodes."}
{HEAD,"path":"spec.ingress.nodes.matchLabels","type":"map of strings","support":"enforced","about":"Labels."}
`, "HEAD", `"kind":"NetworkPolicy","versions":["networking.k8s.io/v1"]`) +
	`{"kind":"CiliumNetworkPolicy","versions":["cilium.io/v2"],"path":"spec","type":"object","support":"converted",` +
	`"becomes":"it allows nothing","values":["a","b"],"about":"All."}` + "\n"

func TestFieldsAreExplainedWithoutAService(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	sluice := func(want int, args ...string) (string, string) {
		t.Helper()
		var out, errOut bytes.Buffer
		args = append([]string{"--run-dir", "/nonexistent", "policy", "explain-field"}, args...)
		if code := invocation.Run(args, &out, &errOut, Command); code != want {
			t.Errorf("%q: exit code %d, want %d\n%s%s", args, code, want, out.String(), errOut.String())
		}
		return out.String(), errOut.String()
	}
	const absent = "sluice-policy, which checks manifests, is neither "
	if _, errOut := sluice(invocation.ExitFailed, "netpol"); !strings.Contains(errOut, absent) {
		t.Errorf("without the program: %s", errOut)
	}
	nodetest.Write(t, bin, "listed", listed)
	program := filepath.Join(bin, "sluice-policy")
	script := "#!/bin/sh\n[ \"$*\" = 'fields' ] || exit 2\n/bin/cat " + filepath.Join(bin, "listed") + "\n"
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil { //nolint:gosec // executable
		t.Fatal(err)
	}
	out, _ := sluice(0)
	nodetest.WantLines(t, out, "NetworkPolicy networking.k8s.io/v1 4 0 0 0", "CiliumNetworkPolicy cilium.io/v2 0 1 0 0")
	out, _ = sluice(0, "netpol")
	nodetest.WantLines(t, out, "Kind: NetworkPolicy (networking.k8s.io/v1)", "spec* object enforced All.")
	if strings.Contains(out, "ingress") {
		t.Errorf("fields of fields without --recursive:\n%s", out)
	}
	out, _ = sluice(0, "netpol", "--recursive")
	nodetest.WantLines(t, out, "spec.ingress.nodes.matchLabels map of strings enforced Labels.")
	out, _ = sluice(0, "NetworkPolicies.spec.ingress[0].nodes")
	nodetest.WantLines(t, out, "Field: spec.ingress.nodes", "Required: false",
		"Support: enforced; refused without the setting cluster.nodeLabels of sluice-policy",
		"matchLabels map of strings enforced Labels.")
	out, _ = sluice(0, "netpol.spec.ingress[0].nodes.matchLabels.example.com/x")
	nodetest.WantLines(t, out, "Field: spec.ingress.nodes.matchLabels")
	out, _ = sluice(0, "cnp.spec")
	nodetest.WantLines(t, out, "Support: converted, it allows nothing", "Values: a, b")
	out, _ = sluice(0, "cnp.spec", "-o", "json")
	var decoded []map[string]any
	if err := nodetest.UnmarshalItems(out, &decoded); err != nil || len(decoded) != 1 ||
		decoded[0]["becomes"] != "it allows nothing" {
		t.Errorf("%v, %s", err, out)
	}
	for text, want := range map[string]string{
		"netpol.spec.ingress[0].form": "NetworkPolicy has no field spec.ingress.form: such a policy is refused; " +
			"there are in spec.ingress: nodes",
		"netpol.spec.ingres":                     "; there are in spec: ingress; did you mean ingress?",
		"netpol.x.y.z":                           "has no field x.y.z: such a policy is refused; there are: spec",
		"pod":                                    `"pod" is not a kind of policy; the kinds are NetworkPolicy (netpol)`,
		"":                                       `"" is not a kind of policy`,
		"ccg":                                    "sluice-policy does not know CiliumCIDRGroup; it may have another version",
		"netpol.\x1b[31m":                        "has no field",
		"netpol." + strings.Repeat("x.", 10_000): "has no field",
	} {
		code := invocation.ExitUsage
		if text == "ccg" {
			code = invocation.ExitFailed
		}
		if _, errOut := sluice(code, text); !strings.Contains(errOut, want) || strings.Contains(errOut, "\x1b") {
			t.Errorf("%q: %q", text, errOut)
		}
	}
	sluice(invocation.ExitUsage, "--recursive")
	if err := os.WriteFile(filepath.Join(bin, "listed"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, errOut := sluice(invocation.ExitFailed, "netpol"); !strings.Contains(errOut, "fields: ") {
		t.Errorf("a program that says something else: %s", errOut)
	}
}

// TestTimeOfWaitMayBeAWordOfItsOwn: users type "--wait 5s" as they type "--timeout 5s".
func TestTimeOfWaitMayBeAWordOfItsOwn(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	n.Want(t, 0, "policy", "apply", "-f", file, "--wait", "30s")
	n.Want(t, 0, "policy", "apply", "--wait=30s", "-f", file)
	n.Want(t, 0, "policy", "delete", "--wait", "30s", "netpol", "shop/web")
	for _, bad := range [][]string{
		{"apply", "-f", file, "--wait", "web.yaml"},
		{"apply", "-f", file, "30s"},
		{"apply", "-f", file, "--wait=5s", "30s"},
		{"apply", "-f", file, "--wait", "30s", "x"},
		{"apply", "-f", file, "--wait", "-1s"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"policy"}, bad...)...)
	}
}

// TestOnlyWhatIsSentCountsForTheLimit: objects that --skip-other-kinds skips do not count, because a bundle of CRDs may
// exceed the limit. Objects without a kind, with an obsolete group, or with a misspelled kind or group are not skipped.
func TestOnlyWhatIsSentCountsForTheLimit(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	crd := "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: c}\nx: |\n  " +
		strings.Repeat("y", manifest.MaxBytes/2) + "\n---\n"
	policy := "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\n"
	bundle := nodetest.Write(t, dir, "bundle.yaml", strings.Repeat(crd, 2)+policy)
	out, errOut := n.Want(t, 0, "policy", "apply", "-f", bundle, "--skip-other-kinds")
	if !strings.Contains(out, "NetworkPolicy shop/web") || strings.Count(errOut, "is not a policy; skipped") != 2 {
		t.Errorf("a bundle: %s%s", out, errOut)
	}
	_, errOut = n.Want(t, invocation.ExitFailed, "policy", "apply", "-f", bundle)
	nodetest.WantLines(t, errOut, "sluice: "+bundle+
		": document 2 (line 7): the manifests up to here are larger than 3145728 bytes, "+
		"the limit of the service for one call")
	docs, err := readPolicies(&invocation.Invocation{ErrOut: io.Discard}, []string{"-"}, strings.NewReader(
		"kind: NetworkPolicy\n---\napiVersion: v1\n---\napiVersion: extensions/v1beta1\nkind: NetworkPolicy\n---\n"+
			"apiVersion: networking.k8s.io/v1\nkind: NetworkPolcy\n---\n"+
			"apiVersion: networking.k8.io/v1\nkind: NetworkPolicy\n---\n"+
			"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicies\n---\n"+
			"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolcy\n---\n"+
			"apiVersion: networking.k8s.io/v1\nkind: NetworkPolcyList\nitems: [{metadata: {name: a}}]\n---\n"+
			"apiVersion: cilium.io/v2\nkind: CiliumEgressGatewayPolicy\n---\napiVersion: v1\nkind: Secret\n"), true)
	if err != nil || len(docs) != 8 {
		t.Errorf("%d documents are kept, %v; want those that may be policies", len(docs), err)
	}
}

func TestFileThatWasNeverReadIsAccepted(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Policy.Missing = map[string]string{"a.yaml": "no YAML", "b.yaml": "no YAML"}
	out, _ := n.Want(t, 0, "policy", "source", "accept-without", "a.yaml", "--dry-run")
	nodetest.WantLines(t, out, "a.yaml was never read: no YAML", "Nothing was changed: --dry-run.")
	out, _ = n.Want(t, invocation.ExitNotReady, "policy", "source", "accept-without", "a.yaml")
	nodetest.WantLines(t, out, "a.yaml was never read: no YAML",
		"It is accepted as missing. Containers are still not connected:", "b.yaml")
	out, _ = n.Want(t, 0, "policy", "source", "accept-without", "b.yaml", "-o", "json")
	if !strings.Contains(out, `"waitingFor": []`) {
		t.Errorf("as JSON: %s", out)
	}
	_, errOut := n.Want(t, invocation.ExitFailed, "policy", "source", "accept-without", "c.yaml")
	nodetest.WantLines(t, errOut, "sluice: nothing waits for c.yaml")
}

func TestUnusualReservedIdentitiesAreOneText(t *testing.T) {
	unusual := []string{
		"reserved:unmanaged", "reserved:health", "reserved:init", "reserved:ingress", "reserved:unknown-in-cluster",
	}
	got := shortReserved(append([]string{"reserved:host"}, unusual...))
	if len(got) != 2 || got[0] != "reserved:host" || !strings.HasPrefix(got[1], "all reserved identities other than") {
		t.Errorf("all: %q", got)
	}
	if got := shortReserved(unusual[1:]); len(got) != 4 {
		t.Errorf("not all: %q", got)
	}
}

func TestNamesOfKindsAreNoted(t *testing.T) {
	n := nodetest.New(t, Command)
	_, errOut := n.Want(t, 0, "policy", "delete", "netpol", "shop/web", "cnp", "--wait=false")
	nodetest.WantLines(t, errOut, `sluice: note: "cnp" is the name of a kind, but is used as the name of a policy; `+
		"policies of several kinds are KIND/[NAMESPACE/]NAME")
	_, errOut = n.Want(t, 0, "policy", "diff", "--delete", "netpol/shop/nosuch")
	nodetest.WantLines(t, errOut, "warning: --delete: this node has no NetworkPolicy shop/nosuch")
}

// TestChangesNameTheNode: a change affects one node, even if the cluster has two.
func TestChangesNameTheNode(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebPolicy)
	const only = "The change applies only to this node (node-a), not 1 other node of the cluster."
	out, _ := n.Want(t, 0, "policy", "apply", "-f", file)
	nodetest.WantLines(t, out, only)
	n.Identity.Cluster.Nodes = 1
	if out, _ = n.Want(t, 0, "policy", "apply", "-f", file); strings.Contains(out, "this node") {
		t.Errorf("with one node: %s", out)
	}
}

// TestPolicyExplainFitsInTheWidthOfATerminal: -o wide has one line for each rule.
func TestPolicyExplainFitsInTheWidthOfATerminal(t *testing.T) {
	match := func(number uint32, decides bool) *policyv1.MatchingRule {
		return &policyv1.MatchingRule{
			Number: number, Decides: decides, Action: policyv1.Action_ACTION_DENY, Tier: policyv1.Tier_TIER_ISOLATION,
			Sources: []*policyv1.RuleSource{{Kind: "NetworkPolicy", Namespace: "shop", Name: "web", Path: "isolation"}},
			Text:    "deny from all peers except the local node on all ports of " + strings.Repeat("a selector ", 4),
		}
	}
	side := &policyv1.SideExplanation{Action: policyv1.Action_ACTION_DENY, Matches: []*policyv1.MatchingRule{
		match(2, true), match(11, false),
	}}
	text := func(wide bool) string {
		var b strings.Builder
		printer{w: &b, wide: wide}.side(side, "Ingress", "what %s may receive")
		return b.String()
	}
	folded, wide := text(false), text(true)
	for line := range strings.Lines(folded) {
		if len(line) > output.Width+1 {
			t.Errorf("a line is longer than %d columns: %s", output.Width, line)
		}
	}
	if strings.Count(wide, "\n") != 4 || !strings.Contains(wide, "\n > 2   deny") ||
		!strings.Contains(wide, "\n   11  deny") {
		t.Errorf("-o wide:\n%s", wide)
	}
	if strings.Join(strings.Fields(folded), " ") != strings.Join(strings.Fields(wide), " ") {
		t.Errorf("the words of both forms differ:\n%s\n%s", folded, wide)
	}
}
