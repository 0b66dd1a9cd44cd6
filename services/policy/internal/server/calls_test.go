// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/rpc/reasontest"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// childSocket tells this test binary to act as a caller, and contains the socket of the server.
const childSocket = "SLUICE_TEST_CALL"

func TestMain(m *testing.M) {
	if socket := os.Getenv(childSocket); socket != "" {
		os.Exit(childCalls(socket))
	}
	os.Exit(reasontest.Run(func() int { return leaktest.Run(m) }, policyv1.ErrorReason_ERROR_REASON_UNSPECIFIED, nil))
}

// calls calls every method once and returns the codes.
func calls(socket string) (map[string]codes.Code, error) {
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	c := policyv1.NewPolicyServiceClient(conn)
	ctx, cancel := context.WithTimeout(context.Background(), servicetest.Patience)
	defer cancel()
	got := map[string]codes.Code{}
	note := func(method string, err error) {
		if errors.Is(err, io.EOF) {
			err = nil
		}
		got[method] = status.Code(err)
	}
	key := &policyv1.PolicyKey{Kind: "NetworkPolicy", Namespace: "shop", Name: "none"}
	_, err = c.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{Manifests: []byte(allowWeb)})
	note("UpsertPolicies", err)
	_, err = c.DeletePolicies(ctx, &policyv1.DeletePoliciesRequest{Keys: []*policyv1.PolicyKey{key}})
	note("DeletePolicies", err)
	_, err = c.ReplacePolicies(ctx, &policyv1.ReplacePoliciesRequest{Manager: "test"})
	note("ReplacePolicies", err)
	_, err = c.CompleteSource(ctx, &policyv1.CompleteSourceRequest{Manager: "test", Incarnation: make([]byte, 16), ValidateOnly: true})
	if status.Code(err) == codes.Aborted { // root passed the access check
		err = nil
	}
	note("CompleteSource", err)
	_, err = c.ConfirmPolicies(ctx, &policyv1.ConfirmPoliciesRequest{})
	note("ConfirmPolicies", err)
	_, err = c.AcceptWithoutFile(ctx, &policyv1.AcceptWithoutFileRequest{File: "a.yaml"})
	if status.Code(err) == codes.FailedPrecondition { // no subscriber waits for the file; the call itself is permitted
		err = nil
	}
	note("AcceptWithoutFile", err)
	_, err = c.LearnNames(ctx, &policyv1.LearnNamesRequest{Name: "example.com", Addresses: []string{"192.0.2.1"}})
	note("LearnNames", err)
	_, err = c.ForgetNames(ctx, &policyv1.ForgetNamesRequest{Pattern: "example.com"})
	note("ForgetNames", err)
	_, err = c.HoldAddresses(ctx, &policyv1.HoldAddressesRequest{})
	note("HoldAddresses", err)
	names, err := c.ListNames(ctx, &policyv1.ListNamesRequest{})
	if err == nil {
		if _, err = names.Recv(); errors.Is(err, io.EOF) {
			err = nil
		}
	}
	note("ListNames", err)
	w, err := c.WatchPolicyTables(ctx)
	if err == nil {
		w.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: subscribe(fmt.Sprint("u", os.Getuid()))}}) //nolint:errcheck // Recv returns the error
		_, err = w.Recv()
	}
	note("WatchPolicyTables", err)
	sets, err := c.WatchRuleSets(ctx, &policyv1.WatchRuleSetsRequest{})
	if err == nil {
		_, err = sets.Recv()
	}
	note("WatchRuleSets", err)
	list, err := c.ListPolicies(ctx, &policyv1.ListPoliciesRequest{})
	if err == nil {
		_, err = list.Recv()
	}
	note("ListPolicies", err)
	_, err = c.GetPolicyTable(ctx, &policyv1.GetPolicyTableRequest{Subject: 300})
	note("GetPolicyTable", err)
	_, err = c.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Subjects: []uint32{65000}})
	note("WaitForRevision", err)
	_, err = c.Explain(ctx, &policyv1.ExplainRequest{From: &policyv1.Peer{Identity: 300}, To: &policyv1.Peer{Identity: 301}, Protocol: 6})
	note("Explain", err)
	diff, err := c.Diff(ctx, &policyv1.DiffRequest{Delete: []*policyv1.PolicyKey{key}})
	if err == nil {
		_, err = diff.Recv()
	}
	note("Diff", err)
	_, err = c.GetStatus(ctx, &policyv1.GetStatusRequest{})
	note("GetStatus", err)
	return got, nil
}

func childCalls(socket string) int {
	got, err := calls(socket)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(got)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func TestKernelOnlyRootChangesAndTheGroupReads(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root: it calls as several users")
	}
	s := serve(t)
	s.know(town)
	s.complete()
	if err := os.Chmod(s.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	reads := []string{"ListNames", "ListPolicies", "GetPolicyTable", "WaitForRevision", "Explain", "Diff", "GetStatus"}
	changes := []string{
		"UpsertPolicies", "DeletePolicies", "ReplacePolicies", "CompleteSource", "ConfirmPolicies",
		"AcceptWithoutFile", "LearnNames", "ForgetNames", "WatchPolicyTables", "HoldAddresses",
		"WatchRuleSets",
	}
	if n := len(policyv1.PolicyService_ServiceDesc.Methods) + len(policyv1.PolicyService_ServiceDesc.Streams); n != len(reads)+len(changes) {
		t.Fatalf("the service has %d methods, this test knows %d", n, len(reads)+len(changes))
	}
	for _, c := range []struct {
		name    string
		uid     uint32
		changes codes.Code
		tables  codes.Code // for WatchPolicyTables and HoldAddresses
		sets    codes.Code // for WatchRuleSets
		names   codes.Code // for LearnNames and ForgetNames
	}{
		{"root", 0, codes.OK, codes.OK, codes.OK, codes.OK},
		{"datapath", 65706, codes.PermissionDenied, codes.OK, codes.PermissionDenied, codes.PermissionDenied},
		{"http", 65708, codes.PermissionDenied, codes.PermissionDenied, codes.OK, codes.PermissionDenied},
		{"dns", 65710, codes.PermissionDenied, codes.PermissionDenied, codes.OK, codes.OK},
		{"identity", 65701, codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied},
		{"itself", 65703, codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied},
		{"a reader", 65799, codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied},
	} {
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		// The binary is in a directory that only root may enter, so open it first and execute the open file.
		self, err := os.Open(exe)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/proc/self/fd/3")
		cmd.ExtraFiles = []*os.File{self}
		cmd.Env = append(os.Environ(), childSocket+"="+filepath.Join(s.dir, "s"))
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: c.uid, Gid: 65700}}
		out, err := cmd.Output()
		self.Close()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		var got map[string]codes.Code
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("%s: %v in %q", c.name, err, out)
		}
		for _, m := range changes {
			want := c.changes
			if m == "WatchPolicyTables" || m == "HoldAddresses" {
				want = c.tables
			}
			if m == "WatchRuleSets" {
				want = c.sets
			}
			if m == "LearnNames" || m == "ForgetNames" {
				want = c.names
			}
			if got[m] != want {
				t.Errorf("%s calls %s: %s, want %s", c.name, m, got[m], want)
			}
		}
		for _, m := range reads {
			if got[m] != codes.OK {
				t.Errorf("%s calls %s: %s, want OK", c.name, m, got[m])
			}
		}
	}
}

func TestDeleteIsRepeatableAndNamesWhatWasAbsent(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(allowWeb)
	keys := []*policyv1.PolicyKey{{Kind: "NetworkPolicy", Namespace: "shop", Name: "db"}, {Kind: "NetworkPolicy", Namespace: "shop", Name: "none"}}
	dry, err := s.DeletePolicies(s.ctx(), &policyv1.DeletePoliciesRequest{Keys: keys, ValidateOnly: true})
	if err != nil || len(s.list()) != 1 || dry.GetRevision() != 1 {
		t.Errorf("validate only: %v, %v", dry, err)
	}
	for i, want := range [][2]policyv1.ChangeType{
		{policyv1.ChangeType_CHANGE_TYPE_DELETED, policyv1.ChangeType_CHANGE_TYPE_ABSENT},
		{policyv1.ChangeType_CHANGE_TYPE_ABSENT, policyv1.ChangeType_CHANGE_TYPE_ABSENT},
	} {
		out, err := s.DeletePolicies(s.ctx(), &policyv1.DeletePoliciesRequest{Keys: keys})
		if err != nil || out.GetRevision() != 2 || out.GetChanges()[0].GetType() != want[0] || out.GetChanges()[1].GetType() != want[1] {
			t.Errorf("delete %d: %v, %v", i, out, err)
		}
	}
}

// TestPoliciesOfAFileAreTheFiles proves INV-61.
func TestPoliciesOfAFileAreTheFiles(t *testing.T) {
	dir := t.TempDir()
	o, err := owner.New(owner.Config{
		Engine: engine.Config{Cluster: "default"}, MaxPolicies: 10, MaxManifestBytes: 1 << 20, Stream: stream.Defaults(), Log: log.Discard(),
	}, dir, []string{managed.SourceFile})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- o.Run(ctx) }()
	defer func() { cancel(); <-done; o.Close() }()
	files := []directory.File{{Origin: "db.yaml", Data: []byte(allowWeb)}}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	f := &Server{Owner: o}
	_, err = f.UpsertPolicies(t.Context(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(allowWeb)})
	wantCode(t, err, codes.AlreadyExists, "NetworkPolicy shop/db belongs to file db.yaml")
	_, err = f.DeletePolicies(t.Context(), &policyv1.DeletePoliciesRequest{Keys: []*policyv1.PolicyKey{{Kind: "NetworkPolicy", Namespace: "shop", Name: "db"}}})
	wantCode(t, err, codes.FailedPrecondition, "NetworkPolicy shop/db belongs to file db.yaml")
}

func TestTableOfNoSubjectIsCompiledForTheAnswerAlone(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(allowWeb)
	f := s.watch(subscribe("datapath", 302)).snapshot()
	got, err := s.GetPolicyTable(s.ctx(), &policyv1.GetPolicyTableRequest{Subject: 301})
	if err != nil || got.GetEgress() != nil || len(got.GetIngress().GetRules()) != 2 || len(got.GetIngressRules()) != 2 || got.GetRevision() != 1 {
		t.Fatalf("table: %v, %v", got, err)
	}
	if st, err := s.GetStatus(s.ctx(), &policyv1.GetStatusRequest{}); err != nil || st.GetTables() != 0 || st.GetSubjects() != 1 {
		t.Errorf("status: %v, %v", st, err)
	}
	f.look(func() {
		if f.messages != 1 {
			t.Errorf("the subscriber got %d messages", f.messages)
		}
	})
	_, err = s.GetPolicyTable(s.ctx(), &policyv1.GetPolicyTableRequest{Subject: 4711})
	wantCode(t, err, codes.NotFound, "identity 4711")
}

func TestListTakesWhatTheFilterSays(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.apply(allowWeb + "---\n" + strings.Replace(named("web", allowWeb), "{app: db}", "{app: web}", 1))
	s.watch(subscribe("datapath", 301)).snapshot()
	for _, c := range []struct {
		filter *policyv1.ListPoliciesRequest
		want   string
	}{
		{&policyv1.ListPoliciesRequest{}, "db[301] web[]"},
		{&policyv1.ListPoliciesRequest{Subject: 300}, "web[]"},
		{&policyv1.ListPoliciesRequest{Name: "db"}, "db[301]"},
		{&policyv1.ListPoliciesRequest{Namespace: "other"}, ""},
		{&policyv1.ListPoliciesRequest{Kind: "CiliumNetworkPolicy"}, ""},
	} {
		stream, err := s.ListPolicies(s.ctx(), c.filter)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprint(m.GetPolicy().GetKey().GetName(), m.GetPolicy().GetSubjects()))
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%v: %q, want %q", c.filter, got, c.want)
		}
	}
}

// TestDiffNamesWorkloadsWithoutLabels: Diff describes workloads without labels in the same way as the list of
// identities.
func TestDiffNamesWorkloadsWithoutLabels(t *testing.T) {
	s := serve(t)
	s.know(map[uint32]string{300: "k8s:app=web " + namespaceLabel + "shop", 301: town[301], 302: "generated:no-labels="})
	s.watch(subscribe("datapath", 301)).snapshot()
	stream, err := s.Diff(s.ctx(), &policyv1.DiffRequest{Manifests: []byte(allowWeb)})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range m.GetPeers() {
			for _, l := range p.GetLabels() {
				if p.GetIdentity() == 302 {
					got = append(got, l.GetSource()+":"+l.GetKey())
				}
			}
		}
	}
	if !slices.Equal(got, []string{"generated:no-labels"}) {
		t.Errorf("labels of the peer 302: %q", got)
	}
}

func TestDiffChangesNothingAndNamesPortsAndPeers(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.watch(subscribe("datapath", 301)).snapshot()
	stream, err := s.Diff(s.ctx(), &policyv1.DiffRequest{Manifests: []byte(allowWeb)})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range m.GetPeers() {
			line := fmt.Sprintf("%d %s %d %q:", m.GetSubject(), m.GetDirection(), p.GetIdentity(), p.GetPrefix())
			for _, x := range m.GetPorts() {
				line += fmt.Sprintf(" %d/%d-%d/%d %s>%s", x.GetFirstProtocol(), x.GetFirstPort(), x.GetLastProtocol(), x.GetLastPort(), x.GetBefore(), x.GetAfter())
			}
			got = append(got, line)
		}
	}
	slices.Sort(got)
	const in = "DIRECTION_INGRESS"
	const most = ": 0/0-255/65535 ACTION_ALLOW>ACTION_DENY"
	want := []string{
		"301 " + in + ` 0 "0.0.0.0/0"` + most,
		"301 " + in + ` 0 "::/0"` + most,
		"301 " + in + ` 300 "": 0/0-6/5431 ACTION_ALLOW>ACTION_DENY 6/5433-255/65535 ACTION_ALLOW>ACTION_DENY`,
		"301 " + in + ` 301 ""` + most,
		"301 " + in + ` 302 ""` + most,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if len(s.list()) != 0 {
		t.Error("the policy exists")
	}
}

// TestTableThatIsTooLargeIsRefusedAsAWhole proves INV-62.
func TestTableThatIsTooLargeIsRefusedAsAWhole(t *testing.T) {
	s := serve(t)
	s.know(town)
	f := s.watch(subscribe("datapath", 301)).snapshot()
	s.apply(allowWeb)
	// Together, the two policies have more intervals than a class may have. Each policy alone would fit.
	ports := func(name string, first, n int) string {
		var b strings.Builder
		for i := first; i < first+n; i++ {
			fmt.Fprintf(&b, "{protocol: TCP, port: %d}, ", 1000+2*i)
		}
		return strings.Replace(named(name, allowWeb), "{protocol: TCP, port: 5432}", b.String(), 1)
	}
	for _, dry := range []bool{true, false} {
		_, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(ports("small", 0, 1000) + "---\n" + ports("big", 1000, 1100)), ValidateOnly: dry})
		wantCode(t, err, codes.ResourceExhausted, "ingress of identity 301: table needs 4203 intervals in one class, the limit is 4096; the largest share is from NetworkPolicy shop/big")
		// A policy that fits into no table, whatever pods it selects.
		_, err = s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(named("small", allowWeb) + "---\n" + ports("big", 0, 2100)), ValidateOnly: dry})
		wantCode(t, err, codes.InvalidArgument,
			"document 2 (line 10): NetworkPolicy shop/big: spec: the ingress rules alone, "+
				"for any subject: table needs 4201 intervals in one rule, the limit is 4096")
	}
	if got := s.list(); len(got) != 1 {
		t.Errorf("there are %d policies", len(got))
	}
	if out, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: 1}); err != nil || out.GetRevision() != 1 {
		t.Errorf("revision: %v, %v", out, err)
	}
	f.look(func() {
		if a, ok := f.lookup(301, policytable.Ingress, 300, netip.Addr{}, tcp5432); !ok || a != policytable.Allow {
			t.Errorf("web to db: %v %t", a, ok)
		}
	})
}

func TestUnknownFieldsAreErrorsUnlessTheyAreAllowed(t *testing.T) {
	s := serve(t)
	s.know(town)
	// Without the intended field, the rule would allow every peer.
	misspelt := strings.Replace(allowWeb, "from:", "form:", 1)
	for _, manifests := range []string{misspelt, named("db2", allowWeb) + "---\n" + misspelt} {
		_, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(manifests)})
		wantCode(t, err, codes.InvalidArgument, "NetworkPolicy shop/db: spec.ingress[0].form: no such field")
		_, err = s.ReplacePolicies(s.ctx(), &policyv1.ReplacePoliciesRequest{Manifests: []byte(manifests), Manager: "x"})
		wantCode(t, err, codes.InvalidArgument, "spec.ingress[0].form: no such field")
		diff, err := s.Diff(s.ctx(), &policyv1.DiffRequest{Manifests: []byte(manifests)})
		if err == nil {
			_, err = diff.Recv()
		}
		wantCode(t, err, codes.InvalidArgument, "spec.ingress[0].form: no such field")
	}
	_, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(strings.Replace(misspelt, "port: 5432", "port: 543210", 1))})
	wantCode(t, err, codes.InvalidArgument, "spec.ingress[0].form: no such field; did you mean from?; "+
		"document 1 (line 1): NetworkPolicy shop/db: spec.ingress[0].ports[0].port")
	if len(s.list()) > 0 {
		t.Errorf("taken were %v", s.list())
	}
	out, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(misspelt), AllowUnknownFields: true})
	if err != nil || !slices.Equal(out.GetChanges()[0].GetDroppedFields(), []string{"spec.ingress[0].form"}) {
		t.Fatalf("allowed: %v, %v", out, err)
	}
	// The accepted policy stays, even after a restart of the service.
	s.stop()
	s.start()
	if p := s.list()["db"]; !p.GetAccepted() || !slices.Equal(p.GetDroppedFields(), []string{"spec.ingress[0].form"}) {
		t.Errorf("after a restart: %v", p)
	}
}

func TestListsAreTheirItems(t *testing.T) {
	s := serve(t)
	s.know(town)
	item := func(name, spec string) string {
		return `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "` + name + `", "namespace": "shop"}, "spec": ` + spec + `}`
	}
	list := `{"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": [` + item("a", `{"podSelector": {}}`) + ", " + item("b", `{"podSelector": {}}`) + `]}`
	const typed = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicyList
items:
- metadata: {name: c}
  spec: {podSelector: {}}
`
	both := list + "\n---\n" + typed + "---\n" + named("d", allowWeb)
	out := s.apply(both)
	var got []string
	for _, c := range out.GetChanges() {
		got = append(got, c.GetKey().GetNamespace()+"/"+c.GetKey().GetName())
	}
	if want := []string{"shop/a", "shop/b", "default/c", "shop/d"}; !slices.Equal(got, want) {
		t.Errorf("accepted: %q, want %q", got, want)
	}
	if again := s.apply(both); again.GetRevision() != out.GetRevision() {
		t.Errorf("the same again has revision %d, before %d", again.GetRevision(), out.GetRevision())
	}
	before := s.list()
	s.stop()
	s.start()
	for name, p := range s.list() {
		if !p.GetAccepted() || string(p.GetManifest()) != string(before[name].GetManifest()) {
			t.Errorf("after a restart: %v", p)
		}
	}
	for manifests, want := range map[string]string{
		strings.Replace(list, `"podSelector": {}`, `"podSelecter": {}`, 1): "document 1 (line 1): " +
			"NetworkPolicy shop/a: items[0].spec.podSelecter: no such field",
		strings.Replace(list, `"b"`, `"a"`, 1): "items[0].metadata.name: another document has the same kind and name; " +
			"document 1 (line 1): NetworkPolicy shop/a: items[1].metadata.name: another document has",
		`{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", "kind": "Service"}, ` +
			`{"kind": "Secret"}]}`: "items[0].kind: v1 Service is not a kind of policy; " +
			"document 1 (line 1): items[1].apiVersion: is missing; kind is Secret",
		"apiVersion: v1\nkind: List\nitems: {a: b}\n":                                    "items: must be a list, is an object",
		"apiVersion: v1\nkind: List\nitems: [a]\n":                                       "items[0]: must be an object",
		"apiVersion: v1\nkind: List\nitem: []\n":                                         "item: no such field of a list",
		"apiVersion: v1\nkind: List\nitems: [&a {kind: x}, *a]\n":                        "items[1]: has an anchor or an alias",
		"apiVersion: v1\nkind: List\nitems: []\n":                                        "there is no document",
		"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: List, items: []}]\n": "items[0].kind: v1 List is not a kind of policy",
	} {
		_, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(manifests)})
		wantCode(t, err, codes.InvalidArgument, want)
	}
}

func TestNamespaceIsThatOfTheCallWhereNoneIsNamed(t *testing.T) {
	s := serve(t)
	for ns, want := range map[string]string{"": "default", "other": "other"} {
		out, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{
			Manifests: []byte(strings.Replace(allowWeb, ", namespace: shop", "", 1)), DefaultNamespace: ns,
		})
		if err != nil || out.GetChanges()[0].GetKey().GetNamespace() != want {
			t.Errorf("%q: %v, %v", ns, out, err)
		}
	}
	s.stop()
	s.start() // the stored policy has the namespace, too
	if got := s.list()["db"]; got == nil || !got.GetAccepted() {
		t.Errorf("after a restart: %v", got)
	}
}

func TestNoMessageIsLargerThanAClientTakes(t *testing.T) {
	s := serve(t)
	ids := map[uint32]string{}
	for n := uint32(1000); n < 9000; n++ {
		ids[n] = fmt.Sprintf("k8s:app=a%d %sshop", n, namespaceLabel)
	}
	s.know(town)
	s.know(ids)
	// Many rules with long names: the source locations of one table are large.
	name := strings.Repeat("n", 240)
	var all strings.Builder
	for i := range 40 {
		all.Reset()
		for j := range 20 {
			fmt.Fprintf(&all, "---\n%s", named(fmt.Sprintf("%s%d-%d", name, i, j), strings.Replace(allowWeb, "5432", fmt.Sprint(1+20*i+j), 1)))
		}
		s.apply(all.String())
	}
	largest, places := 0, 0
	s.watch(subscribe("datapath", 301), func(_ *follower, m *policyv1.WatchPolicyTablesResponse) bool {
		largest = max(largest, proto.Size(m))
		for _, step := range m.GetSteps() {
			places = max(places, len(step.GetBindSubject().GetRules()))
		}
		return true
	}).snapshot().leave()
	if largest > 4<<20 || places < 800 {
		t.Errorf("the largest message has %d bytes, the largest table places of %d rules", largest, places)
	}
}

func TestLearnedNamesOutliveARestartAndEnd(t *testing.T) {
	clock := &fakeClock{now: time.Unix(1_700_000_000, 0)}
	at := func(c *owner.Config) { c.Now = clock.Now }
	s := serve(t, at)
	s.know(town)
	s.apply(learnWeb)
	s.watch(subscribe("datapath", 300)).snapshot()
	addr := netip.MustParseAddr("192.0.2.7")
	if _, err := s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: "api.example.com", Addresses: []string{addr.String()}}); err != nil {
		t.Fatal(err)
	}
	verdict := func() policyv1.Action {
		x, err := s.Explain(s.ctx(), &policyv1.ExplainRequest{From: &policyv1.Peer{Identity: 300}, To: &policyv1.Peer{Address: addr.String()}, Protocol: 6, Port: 443})
		if err != nil {
			t.Fatal(err)
		}
		return x.GetVerdict()
	}
	s.stop()
	s.start(at)
	if v := verdict(); v != policyv1.Action_ACTION_ALLOW {
		t.Errorf("after a restart: %s", v)
	}
	clock.Add(90 * time.Second) // after its TTL, within the grace period
	s.poke()
	if v := verdict(); v != policyv1.Action_ACTION_ALLOW {
		t.Errorf("in the grace period: %s", v)
	}
	clock.Add(time.Minute)
	s.poke()
	servicetest.Eventually(t, "the end of the address", func() bool { return verdict() == policyv1.Action_ACTION_DENY })
}

// TestTheLargestTablesFitIntoAnAnswer: the largest possible tables fit into one answer.
func TestTheLargestTablesFitIntoAnAnswer(t *testing.T) {
	j := query.Evaluated{Bound: [2]bool{true, true}}
	for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
		content := &table.Table{
			Rules: make([]policytable.Rule, table.MaxRules), Peers: make(map[policytable.IdentityClass]policytable.Class),
		}
		b := table.NewBuilder()
		for n := 0; ; n++ { // the maximum number of ranges, all of them long
			list := make([]table.Interval, 1024)
			for i := range list {
				list[i] = table.Interval{Hi: port.Point(1<<31 + i), Value: table.MakeValue(table.MaxAdminRules, uint16(table.MaxRules-i%2))}
			}
			list[0].Value = table.MakeValue(uint16(n+1), table.MaxRules)
			list[1023].Hi = port.Last
			if _, err := b.Class(content, list); err != nil {
				break
			}
		}
		if content.Listed != table.MaxAllIntervals {
			t.Errorf("%d ranges, but the maximum is %d", content.Listed, table.MaxAllIntervals)
		}
		for i := range table.MaxPeers {
			content.Peers[policytable.IdentityClass(1<<31+i)] = 5000
		}
		for i := range table.MaxPrefixes {
			at := [16]byte{0x20, 1, 14: byte(i >> 8), 15: byte(i)}
			content.Prefixes.Set(netip.PrefixFrom(netip.AddrFrom16(at), 128), [identity.PeerScopes]policytable.Class{5000, 5000, 5000})
			content.Prefixes.Set(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 32), [identity.PeerScopes]policytable.Class{5000, 5000, 5000})
		}
		j.Tables[d] = content.Definition(1<<40, [32]byte{})
		for i := range table.MaxRules {
			j.Sources[d] = append(j.Sources[d], []policytable.Source{{
				Kind: "CiliumClusterwideNetworkPolicy", Name: strings.Repeat("n", 253), Path: fmt.Sprintf("spec.egress[%d].toPorts[%d]", i, i),
			}})
		}
	}
	out := policyTable(j)
	if size := proto.Size(out); size > rpc.MaxSend {
		t.Errorf("the answer has %d bytes, a message takes %d", size, rpc.MaxSend)
	}
	if n := len(out.GetEgressRules()); n < 5000 || n == table.MaxRules {
		t.Errorf("the places of %d of %d rules are in the answer", n, table.MaxRules)
	}
}

func TestFileThatNothingWaitsForIsNamed(t *testing.T) {
	s := serve(t)
	_, err := s.AcceptWithoutFile(s.ctx(), &policyv1.AcceptWithoutFileRequest{File: "a.yaml"})
	wantCode(t, err, codes.FailedPrecondition, "no directory of policies is configured")
	if !rpcerr.Is(err, policyv1.ErrorReason_ERROR_REASON_FILE_NOT_MISSING) {
		t.Errorf("%v has another reason", err)
	}
}

func TestEverySourceHasAKindOfTheAPI(t *testing.T) {
	kinds := make(map[policyv1.SourceKind]string)
	for _, s := range source.All() {
		kind := sourceKinds[s.Name]
		if other, taken := kinds[kind]; taken || kind == policyv1.SourceKind_SOURCE_KIND_UNSPECIFIED {
			t.Errorf("%s has the kind %v, which is %q", s.Name, kind, other)
		}
		kinds[kind] = s.Name
	}
}
