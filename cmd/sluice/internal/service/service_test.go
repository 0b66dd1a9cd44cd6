// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package service

import (
	"encoding/json"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

func TestApplyWaitsUntilTheKernelEnforces(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService)
	out, _ := n.Want(t, 0, "service", "apply", "-f", file, "--dry-run")
	nodetest.WantLines(t, out, "Service shop/web created", "EndpointSlice shop/web-1 created",
		"Nothing was changed: --dry-run.")
	if len(n.Balancer.Objects) > 0 {
		t.Fatalf("--dry-run has stored %v", n.Balancer.Objects)
	}
	out, _ = n.Want(t, 0, "service", "apply", "-f", file, "--wait-drained")
	nodetest.WantLines(t, out, "Service shop/web created")
	if !strings.Contains(out, "The kernel enforces revision 7, after ") {
		t.Errorf("apply says\n%s", out)
	}
	// The slice belongs to the Service that its label names, so the command waits for one Service.
	w := n.Balancer.Waited
	if len(w.GetServices()) != 1 || w.GetServices()[0].GetName() != "web" || w.GetRevision() != 7 || !w.GetEnded() {
		t.Errorf("it waited for %v", w)
	}
	out, _ = n.Want(t, 0, "service", "apply", "-f", file, "--wait=false")
	nodetest.WantLines(t, out, "Service shop/web unchanged",
		"Revision 7 is stored in the load balancer; the command did not wait until the kernel enforced it.")
}

func TestApplyNamesWhatTheKernelRefuses(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService)
	n.Balancer.WaitError = status.Error(codes.FailedPrecondition,
		"datapath does not enforce 10.96.0.10:80/TCP: no capacity")
	out, _ := n.Want(t, invocation.ExitNotReady, "service", "apply", "-f", file)
	nodetest.WantLines(t, out, "Revision 7 is stored, but the kernel does not enforce it: "+
		"datapath does not enforce 10.96.0.10:80/TCP: no capacity.")
	out, _ = n.Want(t, invocation.ExitNotReady, "service", "apply", "-f", file, "-o", "json")
	var done struct {
		Enforced *bool
		Pending  string
		Changes  []struct{ Type, File string }
	}
	if err := json.Unmarshal([]byte(out), &done); err != nil || done.Enforced == nil || *done.Enforced ||
		!strings.HasSuffix(done.Pending, "no capacity") {
		t.Errorf("apply -o json: %v, %s", err, out)
	}

	n.Balancer.WaitError = status.Error(codes.DeadlineExceeded, "")
	out, _ = n.Want(t, invocation.ExitNotReady, "service", "apply", "-f", file, "--wait=20ms")
	nodetest.WantLines(t, out, "Revision 7 is stored, but the kernel does not enforce it: timed out after 20ms; "+
		"`sluice status` shows the progress.")
	n.Balancer.Mu.Lock() // the previous call may still run in the fake
	n.Balancer.WaitError, n.Balancer.Disconnected = nil, []string{"datapath"}
	n.Balancer.Mu.Unlock()
	out, _ = n.Want(t, invocation.ExitNotReady, "service", "apply", "-f", file)
	nodetest.WantLines(t, out, "Revision 7 is stored, but the kernel does not enforce it: not connected: datapath.")
	n.Balancer.Disconnected, n.Balancer.Enforcing = nil, nil
	out, _ = n.Want(t, invocation.ExitNotReady, "service", "apply", "-f", file)
	if !strings.Contains(out, "no datapath is connected to the load balancer") {
		t.Errorf("without a datapath\n%s", out)
	}
}

func TestApplyNamesFileAndFieldOfWhatIsWrong(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	good := nodetest.Write(t, dir, "good.yaml", nodetest.WebService)
	bad := nodetest.Write(t, dir, "bad.yaml", "kind: Service\nmetadata: {name: x}\nspec: {refuse: it is a test}\n")
	_, errOut := n.Want(t, invocation.ExitFailed, "service", "apply", "-f", good, "-f", bad)
	nodetest.WantLines(t, errOut, "sluice: "+bad+": document 1 (line 1): Service x: spec.refuse: it is a test")
	if len(n.Balancer.Objects) > 0 {
		t.Errorf("the other objects were stored: %v", n.Balancer.Objects)
	}
	unknown := nodetest.Write(t, dir, "unknown.yaml",
		"kind: Service\nmetadata: {name: x, namespace: shop}\nspec: {unknown: x, clusterIP: 10.96.0.11, port: 1}\n")
	n.Want(t, invocation.ExitFailed, "service", "apply", "-f", unknown)
	_, errOut = n.Want(t, 0, "service", "apply", "-f", unknown, "--allow-unknown-fields")
	nodetest.WantLines(t, errOut,
		"warning: "+unknown+": document 1 (line 1): Service shop/x: spec.unknown: no such field; it is ignored")

	// A dump of a cluster also has other objects.
	mixed := nodetest.Write(t, dir, "mixed.yaml",
		nodetest.WebService+"---\napiVersion: v1\nkind: Pod\nmetadata: {name: p}\n")
	_, errOut = n.Want(t, 0, "service", "apply", "-f", mixed, "--skip-other-kinds")
	nodetest.WantLines(t, errOut,
		"note: "+mixed+": document 3 (line 11): Pod p: is not a service or an endpoint slice; skipped")
	misspelled := nodetest.Write(t, dir, "misspelled.yaml",
		nodetest.WebService+"---\napiVersion: v1\nkind: Servicex\nmetadata: {name: p}\n")
	docs, err := readManifests(&invocation.Invocation{ErrOut: io.Discard}, []string{misspelled}, nil, true)
	if err != nil || len(docs) != 3 {
		t.Errorf("%d documents are kept, %v; want also the misspelled Service, which the load balancer refuses", len(docs),
			err)
	}
	_, errOut = n.Want(t, invocation.ExitFailed, "service", "delete", "-f", mixed)
	nodetest.WantLines(t, errOut, "sluice: "+mixed+": document 3 (line 11): Pod p: is not a service or an endpoint slice")
	for _, args := range [][]string{
		{"apply"},
		{"apply", "x"},
		{"delete"},
		{"delete", "web", "-f", good},
		{"delete", "a/b/c"},
		{"delete", "/web"},
		{"get"},
		{"get", ""},
		{"list", "--address", "web"},
		{"list", "x"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"service"}, args...)...)
	}
}

func TestListAndGetShowWhereAServiceLeads(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService)
	n.Want(t, 0, "service", "apply", "-f", file)
	n.Balancer.Notes = []string{"spec.x is not supported\x1b[2J"}
	n.Balancer.Extra = []*lbv1.Service{
		{Namespace: "shop", Name: "quiet", Type: "Headless", Source: "file", Origin: "quiet.yaml", Endpoints: 3},
		{
			Namespace: "shop", Name: "door", Type: "LoadBalancer", Source: "grpc", Manager: "argo",
			Addresses: []string{"fd00:96::1"},
			Ports: []*lbv1.ServicePort{{
				Name: "dns", Protocol: netv1.Protocol_PROTOCOL_UDP, Port: 53,
				NodePort: 30053,
			}}, Revision: 5, Algorithm: lbv1.Algorithm_ALGORITHM_TABLE,
			Frontends: []*lbv1.Frontend{
				{
					Key: &lbv1.FrontendKey{
						Port: 30053, Protocol: netv1.Protocol_PROTOCOL_UDP, Family: lbv1.IPFamily_IP_FAMILY_IPV6,
					},
					Kind: lbv1.FrontendKind_FRONTEND_KIND_NODE_PORT, PortName: "dns", AffinitySeconds: 10800,
					Inside: &lbv1.BackendList{Backends: []*lbv1.Backend{{Address: "fd00:244::2", Port: 5353, Terminating: true}}},
					Outside: &lbv1.BackendList{
						WhenEmpty: lbv1.EmptyAction_EMPTY_ACTION_DROP,
						Draining: []*lbv1.Backend{
							{Address: "fd00:244::2", Port: 5353, Terminating: true}, {Address: "fd00:244::3", Port: 5353},
						},
					},
				},
				{
					Key:          &lbv1.FrontendKey{Address: "fd00:96::1", Port: 53, Protocol: netv1.Protocol_PROTOCOL_UDP},
					Kind:         lbv1.FrontendKind_FRONTEND_KIND_LOAD_BALANCER,
					Outside:      &lbv1.BackendList{WhenEmpty: lbv1.EmptyAction_EMPTY_ACTION_REJECT},
					SourceRanges: []string{"192.0.2.0/24"},
				},
			},
		},
	}
	n.Balancer.Refused = []*lbv1.RefusedObject{
		{
			Key: &lbv1.ObjectKey{Kind: "EndpointSlice", Namespace: "shop", Name: "lost-1"}, Source: "grpc",
			Error: "its service shop/lost is missing",
		},
		{Source: "file", Origin: "z.yaml", Error: "is no YAML"},
	}
	out, _ := n.Want(t, 0, "service", "list")
	nodetest.WantLines(t, out, "NAMESPACE NAME TYPE ADDRESSES PORTS READY ENFORCED AGE SOURCE",
		"shop web ClusterIP 10.96.0.10 80/TCP 2/2 yes 3h0m0s grpc",
		"shop door LoadBalancer fd00:96::1 53:30053/UDP 0/0 no - grpc:argo",
		`shop/web: spec.x is not supported\x1b[2J`,
		"EndpointSlice shop/lost-1 is not accepted as given: its service shop/lost is missing",
		"file:z.yaml is not accepted as given: is no YAML",
		"Services without an address, shown with --all: 1.")
	out, _ = n.Want(t, 0, "service", "list", "--all", "--address", "fd00:96::1")
	if strings.Contains(out, "shop web") || strings.Contains(out, "quiet") || !strings.Contains(out, "door") {
		t.Errorf("--address\n%s", out)
	}
	out, _ = n.Want(t, 0, "service", "list", "--all", "-n", "shop", "-o", "json")
	var all struct {
		Items    message.Items[*lbv1.Service]
		Refused  message.Items[*lbv1.RefusedObject]
		Revision int
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all.Items) != 3 ||
		len(all.Refused) != 2 || all.Revision != 7 || strings.Count(out, `"algorithm": "table"`) != 1 {
		t.Errorf("list -o json: %v, %s", err, out)
	}

	out, _ = n.Want(t, 0, "service", "get", "shop/web")
	nodetest.WantLines(t, out, "Service shop/web", "Endpoints 2 of 2 ready", "Affinity none",
		"Revision 7, enforced by the kernel",
		"FRONTEND KIND PORT FROM BACKENDS",
		"10.96.0.10:80/TCP cluster-ip http everywhere 10.244.0.2:8080, 10.244.0.3:8080")
	out, _ = n.Want(t, 0, "service", "get", "door", "-n", "shop")
	nodetest.WantLines(t, out, "Ports dns 53:30053/UDP", "Source ranges 192.0.2.0/24",
		"Affinity a client keeps its backend if it returns within 3h0m0s", "Revision 5, not enforced by the kernel",
		"Algorithm table",
		"node:30053/UDP (IPv6) node-port dns inside [fd00:244::2]:5353 (terminating)",
		"outside none on this node: packets are dropped; draining [fd00:244::2]:5353",
		"[fd00:96::1]:53/UDP load-balancer - outside none: connections are refused")
	_, errOut := n.Want(t, invocation.ExitFailed, "service", "get", "web")
	nodetest.WantLines(t, errOut, "sluice: no service default/web; see `sluice service list --all`")
}

func TestDiffExitsAsDiffDoes(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	file := nodetest.Write(t, dir, "web.yaml", nodetest.WebService)
	out, _ := n.Want(t, exitDiffers, "service", "diff", "-f", file)
	nodetest.WantLines(t, out, "Service shop/web would be created", "EndpointSlice shop/web-1 would be created")
	if len(n.Balancer.Objects) > 0 {
		t.Fatal("diff has changed something")
	}
	n.Want(t, 0, "service", "apply", "-f", file)
	out, _ = n.Want(t, 0, "service", "diff", "-f", file)
	if out != "Nothing would change.\n\nCompared: this node (node-a), not 1 other node of the cluster.\n" {
		t.Errorf("the same again: %q", out)
	}
	other := nodetest.Write(t, dir, "other.yaml", strings.Replace(nodetest.WebService, ", 10.244.0.3", "", 1))
	out, _ = n.Want(t, exitDiffers, "service", "diff", "-f", other)
	if out != "EndpointSlice shop/web-1  would be replaced\n"+
		"\nCompared: this node (node-a), not 1 other node of the cluster.\n" {
		t.Errorf("one of two differs: %q", out)
	}
	n.Want(t, exitTrouble, "service", "diff")
	n.Want(t, exitTrouble, "service", "diff", "-f", "absent.yaml")
	bad := nodetest.Write(t, dir, "bad.yaml", "kind: Service\nmetadata: {name: x}\nspec: {refuse: why}\n")
	n.Want(t, exitTrouble, "service", "diff", "-f", bad)
}

func TestDeleteByNameLeavesSlices(t *testing.T) {
	n := nodetest.New(t, Command)
	file := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService)
	n.Want(t, 0, "service", "apply", "-f", file)
	out, _ := n.Want(t, 0, "service", "delete", "shop/web", "none")
	nodetest.WantLines(t, out, "Service shop/web deleted", "Service default/none absent")
	if len(n.Balancer.Objects) != 1 {
		t.Errorf("left are %v, want the slice", n.Balancer.Objects)
	}
	out, _ = n.Want(t, 0, "service", "delete", "-f", file)
	nodetest.WantLines(t, out, "Service shop/web absent", "EndpointSlice shop/web-1 deleted")
}

// TestApplyNotesWhatIsProbablyNotMeant applies valid Services that are probably mistakes, and expects a note: one has a
// selector, which selects nothing without Kubernetes, and one has an address in a pod CIDR.
func TestApplyNotesWhatIsProbablyNotMeant(t *testing.T) {
	n := nodetest.New(t, Command)
	dir := t.TempDir()
	selects := "apiVersion: v1\nkind: Service\nmetadata: {name: sel, namespace: shop}\n" +
		"spec: {clusterIP: 10.96.0.11, port: 80, selector: {app: web}}\n"
	slice := "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: sel-1, namespace: shop, " +
		"labels: {kubernetes.io/service-name: sel}}\nspec: {addresses: []}\n"
	const noted = "NOTE Service shop/sel: its selector has no effect without Kubernetes: apply an " +
		"EndpointSlice with the label kubernetes.io/service-name: sel"
	notes := func(text string) string {
		t.Helper()
		file := nodetest.Write(t, dir, "s.yaml", text)
		_, errOut := n.Want(t, 0, "service", "apply", "-f", file)
		place := "note: " + file + ": document 1 (line 1): "
		return strings.ReplaceAll(errOut, place, "NOTE ")
	}
	if got := notes(selects); got != noted+"\n" {
		t.Errorf("a selector without a slice: %q", got)
	}
	if got := notes(selects + slice); got != "" {
		t.Errorf("with a slice: %q", got)
	}
	if got := notes(nodetest.WebService); got != "" {
		t.Errorf("without a selector: %q", got)
	}
	n.Balancer.Sources = append(n.Balancer.Sources, &lbv1.SourceStatus{Name: "kubernetes"})
	if got := notes(selects); got != "" {
		t.Errorf("with Kubernetes: %q", got)
	}
	for _, address := range []string{"10.244.0.2", "10.244.0.9"} { // a pod has it, or may get it
		got := notes(strings.Replace(nodetest.WebService, "10.96.0.10", address, 1))
		if want := "NOTE Service shop/web: its address " + address + " is in the pod CIDR 10.244.0.0/24 of node node-a, " +
			"so a pod may have the same address\n"; got != want {
			t.Errorf("a cluster IP of pods: %q, want %q", got, want)
		}
	}
	n.Stop("identity") // the notes are missing, and the change is made
	if got := notes(strings.Replace(nodetest.WebService, "10.96.0.10", "10.244.0.2", 1)); got != "" {
		t.Errorf("without sluice-identity: %q", got)
	}
}
