// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func owner(id string) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}
}

// held returns a confirmed allocation.
func held(id string, addresses ...string) *ipamv1.Allocation {
	a := &ipamv1.Allocation{Owner: owner(id), State: ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED}
	for _, x := range addresses {
		a.Addresses = append(a.Addresses, &ipamv1.Address{Address: x})
	}
	return a
}

func leased(id string, addresses ...string) *ipamv1.Allocation {
	a := held(id, addresses...)
	a.State = ipamv1.AllocationState_ALLOCATION_STATE_LEASED
	a.LeaseExpireTime = timestamppb.New(time.Now().Add(time.Minute))
	return a
}

func managed(id, manager string, addresses ...string) *ipamv1.Allocation {
	a := held(id, addresses...)
	a.Manager = manager
	return a
}

func live(id string, addresses ...string) *datapathv1.Endpoint {
	return &datapathv1.Endpoint{
		Owner: owner(id), Addresses: addresses, State: datapathv1.EndpointState_ENDPOINT_STATE_READY,
	}
}

// compared returns the output of check.
type compared struct {
	Allocations int
	Endpoints   int
	Cluster     bool `json:"comparedWithCluster"`
	Findings    []struct {
		Kind, Address, Text string
		Owner               *struct{ ContainerID, InterfaceName string }
	}
}

// findings returns the findings of check as "kind address owner".
func findings(t *testing.T, n *nodetest.Node, args ...string) (found []string, whole compared) {
	t.Helper()
	code, out, errOut := n.Sluice(append([]string{"ipam", "check", "--settle", "0s", "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &whole); err != nil {
		t.Fatalf("%v: %s%s", err, out, errOut)
	}
	for _, f := range whole.Findings {
		text := f.Kind + " " + f.Address
		if o := f.Owner; o != nil {
			text += " " + o.ContainerID + "/" + o.InterfaceName
		}
		found = append(found, text)
	}
	want := 0
	if len(found) > 0 {
		want = invocation.ExitFailed
	}
	if code != want {
		t.Errorf("exit code %d with %q", code, found)
	}
	return found, whole
}

func TestAddressesAreComparedWithEndpointsAndTheCluster(t *testing.T) {
	n := nodetest.New(t, Command)
	good := func() {
		n.IPAM.Allocations = [][]*ipamv1.Allocation{{held("a", "10.244.0.2", "fd00:244::2"), held("b", "10.244.0.3")}}
		n.Endpoints = []*datapathv1.Endpoint{live("a", "10.244.0.2", "fd00:244::2"), live("b", "10.244.0.3")}
		n.Cluster.Mapped = map[string]string{"10.244.0.2": "node-a", "fd00:244::2": "node-a", "10.244.0.3": "node-a"}
		n.Cluster.Listed = nil
	}
	for name, c := range map[string]struct {
		change func()
		want   []string
	}{
		"as it should be": {func() {}, nil},
		"another owner": {
			func() {
				n.IPAM.Allocations[0] = append(n.IPAM.Allocations[0], held("c", "10.244.0.10"), held("d", "10.244.0.9"))
			},
			[]string{"leaked 10.244.0.9 d/eth0", "leaked 10.244.0.10 c/eth0"},
		},
		"a lease, and one of another manager": {
			func() {
				n.IPAM.Allocations[0] = append(n.IPAM.Allocations[0],
					leased("c", "10.244.0.9"), managed("d", "nomad", "10.244.0.8"))
			}, nil,
		},
		"an endpoint without one": {
			func() { n.IPAM.Allocations[0] = n.IPAM.Allocations[0][:1] }, []string{"missing 10.244.0.3 b/eth0"},
		},
		"half of the addresses": {
			func() { n.IPAM.Allocations[0][0] = held("a", "10.244.0.2") }, []string{"missing fd00:244::2 a/eth0"},
		},
		"another has it": {
			func() { n.IPAM.Allocations[0][1] = held("c", "10.244.0.3") }, []string{"held-twice 10.244.0.3 c/eth0"},
		},
		"two endpoints": {
			func() { n.Endpoints = append(n.Endpoints, live("c", "10.244.0.3")) },
			[]string{"held-twice 10.244.0.3 b/eth0", "held-twice 10.244.0.3 c/eth0"},
		},
		"not published": {
			func() { delete(n.Cluster.Mapped, "10.244.0.3") },
			[]string{"unpublished 10.244.0.3 b/eth0"},
		},
		"not published yet": {
			func() {
				n.Cluster.Mapped["10.244.0.3"] = ""
				n.Endpoints[1].State = datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_IDENTITY
			}, nil,
		},
		"of another node": {
			func() { n.Cluster.Mapped["10.244.0.3"] = "node-b" },
			[]string{"held-twice 10.244.0.3 b/eth0"},
		},
		"published, and gone": {
			func() {
				n.IPAM.Allocations[0] = append(n.IPAM.Allocations[0], held("c", "10.244.0.9"))
				n.Cluster.Mapped["10.244.0.9"] = "node-a"
				n.Cluster.Listed = []*identityv1.IPMapping{
					{Prefix: "10.244.0.77/32", Node: "node-a"},
					{Prefix: "fd00:244::77/128", Node: "node-a"},
					{Prefix: "10.244.1.7/32", Node: "node-b"},
				}
			}, []string{
				"leaked 10.244.0.9 c/eth0", "published 10.244.0.9", "published 10.244.0.77", "published fd00:244::77",
			},
		},
		"nothing at all": {
			func() {
				n.IPAM.Allocations[0], n.Endpoints = nil, []*datapathv1.Endpoint{}
				n.Cluster.Mapped = map[string]string{}
			}, nil,
		},
	} {
		good()
		c.change()
		if got, _ := findings(t, n); !slices.Equal(got, c.want) {
			t.Errorf("%s: found %q, want %q", name, got, c.want)
		}
	}
	good()
	n.Identity.StoreError = "away"
	n.Cluster.Mapped["10.244.0.3"] = "node-b"
	if got, r := findings(t, n); len(got) > 0 || r.Cluster {
		t.Errorf("with etcd unavailable: %q, %v", got, r)
	}
	out, _ := n.Want(t, 0, "ipam", "check")
	nodetest.WantLines(t, out, "Compared 2 allocations and 2 endpoints; the cluster was not asked, "+
		"because the node is not registered or etcd is unavailable. Findings: 0.")
	good()
	n.IPAM.Allocations[0] = append(n.IPAM.Allocations[0], held("x\x1b[2J", "10.244.0.9"))
	out, _ = n.Want(t, invocation.ExitFailed, "ipam", "check", "--settle", "0s")
	if !strings.Contains(out, `leaked   10.244.0.9  x\x1b[2J/eth0`) || strings.Contains(out, "\x1b") {
		t.Errorf("printed\n%s", out)
	}
	n.Want(t, invocation.ExitUsage, "ipam", "check", "--settle", "-1s")
	n.Stop("datapath")
	n.Want(t, invocation.ExitFailed, "ipam", "check")
}

// TestWhatIsOnlySeenOnceIsNoFinding: a container may start or end between the two requests.
func TestWhatIsOnlySeenOnceIsNoFinding(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Endpoints = []*datapathv1.Endpoint{}
	n.Cluster.Mapped = map[string]string{}
	n.IPAM.Allocations = [][]*ipamv1.Allocation{
		{held("a", "10.244.0.2"), held("b", "10.244.0.3")}, {held("b", "10.244.0.3"), held("c", "10.244.0.2")},
	}
	if got, _ := findings(t, n); !slices.Equal(got, []string{"leaked 10.244.0.3 b/eth0"}) {
		t.Errorf("found %q", got)
	}
}

func TestAllocationsAndFindingsNameThePod(t *testing.T) {
	n := nodetest.New(t, Command)
	web := live("a", "10.244.0.2", "10.244.0.3")
	web.Pod = &workloadv1.PodReference{Namespace: "shop", Name: "web"}
	n.Endpoints = []*datapathv1.Endpoint{web}
	n.IPAM.Allocations = [][]*ipamv1.Allocation{{held("a", "10.244.0.2"), held("b", "10.244.0.4")}}
	out, _ := n.Want(t, 0, "ipam", "list")
	nodetest.WantLines(t, out,
		"CONTAINER POD STATE ADDRESSES LEASE ENDS IN", "a/eth0 shop/web confirmed 10.244.0.2 -",
		"b/eth0 - confirmed 10.244.0.4 -")
	out, _ = n.Want(t, invocation.ExitFailed, "ipam", "check", "--settle", "0s")
	nodetest.WantLines(t, out, "leaked 10.244.0.4 b/eth0 -", "missing 10.244.0.3 a/eth0 shop/web")
	out, _ = n.Want(t, 0, "ipam", "list", "-o", "json")
	if strings.Count(out, `"pod": {`) != 1 || !strings.Contains(out, `"name": "web"`) {
		t.Errorf("printed\n%s", out)
	}
	n.Stop("datapath")
	out, errOut := n.Want(t, 0, "ipam", "list")
	nodetest.WantLines(t, out, "a/eth0 - confirmed 10.244.0.2 -")
	if !strings.Contains(errOut, "warning: the pods are missing: ") {
		t.Errorf("without the datapath: %s", errOut)
	}
}

func TestAnOwnerWithoutAnEndpointIsReleased(t *testing.T) {
	n := nodetest.New(t, Command)
	long := strings.Repeat("ab", 32)
	n.IPAM.Allocations = [][]*ipamv1.Allocation{{
		held("ghost", "10.244.0.9", "fd00:244::9"), held(long, "10.244.0.8"), held("used", "10.244.0.2"),
		leased("lease", "10.244.0.7"), managed("other", "nomad", "10.244.0.6"), held("twice", "10.244.0.3"),
	}}
	n.Endpoints = []*datapathv1.Endpoint{live("used", "10.244.0.2"), live("elsewhere", "10.244.0.3")}
	for _, c := range []struct {
		name, owner, say string
	}{
		{"ghost", "ghost", "ghost/eth0 released 10.244.0.9 and fd00:244::9."},
		{"ghost/eth0", "ghost", "ghost/eth0 released 10.244.0.9 and fd00:244::9."},
		{"10.244.0.9", "ghost", "ghost/eth0 released 10.244.0.9 and fd00:244::9."},
		{"fd00:244:0::9", "ghost", "ghost/eth0 released 10.244.0.9 and fd00:244::9."},
		{"abab", long, long[:13] + "/eth0 released 10.244.0.8."},
	} {
		n.IPAM.Released = nil
		out, _ := n.Want(t, 0, "ipam", "release", c.name)
		nodetest.WantLines(t, out, c.say)
		if r := n.IPAM.Released; r.GetOwner().GetContainerId() != c.owner || r.GetValidateOnly() ||
			!strings.HasSuffix(c.say, "released "+strings.Join(r.GetAddresses(), " and ")+".") {
			t.Errorf("%s: asked for %v", c.name, r)
		}
	}
	n.IPAM.Released = nil
	for name, want := range map[string]string{
		"used":       "used/eth0: it has an endpoint; delete the endpoint to release its addresses; use --force ",
		"10.244.0.3": "twice/eth0: the endpoint elsewhere/eth0 has 10.244.0.3; use --force ",
		"lease":      "lease/eth0: an ADD is in progress, or has failed; the lease expires at ",
		"other":      `other/eth0: the manager "nomad" owns it and decides when it is released; use --force `,
		"absent":     "no allocation of absent; see `sluice ipam list`",
		"10.244.9.9": "no allocation of 10.244.9.9; see `sluice ipam list`",
		"":           `"" is neither CONTAINER[/INTERFACE] nor the pod NAMESPACE/NAME`,
	} {
		for _, flag := range []string{"--dry-run=false", "--dry-run"} {
			code, out, errOut := n.Sluice("ipam", "release", flag, "--", name)
			if code == 0 || !strings.Contains(errOut, want) || n.IPAM.Released != nil {
				t.Errorf("%q: exit code %d, %s%s; asked for %v", name, code, out, errOut, n.IPAM.Released)
			}
		}
	}
	out, _ := n.Want(t, 0, "ipam", "release", "used", "--force", "--dry-run")
	nodetest.WantLines(t, out, "Nothing was released: --dry-run. used/eth0 would lose 10.244.0.2.")
	if !n.IPAM.Released.GetValidateOnly() {
		t.Error("--dry-run was not asked for")
	}
	out, _ = n.Want(t, 0, "ipam", "release", "used", "--force", "-o", "json")
	released := &ipamv1.ReleaseResponse{}
	if err := message.Unmarshal([]byte(out), released); err != nil ||
		fmt.Sprint(addressesOf(released.GetReleased())) != "[10.244.0.2]" {
		t.Errorf("%v: %s", err, out)
	}
	n.IPAM.ReleaseOf = status.Error(codes.PermissionDenied, "uid 65534 may not call Release")
	_, errOut := n.Want(t, invocation.ExitFailed, "ipam", "release", "ghost")
	if !strings.Contains(errOut, "Only root may do this") {
		t.Errorf("of another user: %s", errOut)
	}
	n.IPAM.ReleaseOf = nil
	n.Stop("datapath")
	_, errOut = n.Want(t, invocation.ExitFailed, "ipam", "release", "ghost")
	if !strings.Contains(errOut, "cannot check whether an endpoint still uses the addresses") {
		t.Errorf("without the datapath: %s", errOut)
	}
	n.Want(t, 0, "ipam", "release", "ghost", "--force")
}

// TestSizesInJSONAreKnownExactly: jq and JavaScript round 18446744073709551615 to 18446744073709552000.
func TestSizesInJSONAreKnownExactly(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "ipam", "pools", "-o", "json")
	if !strings.Contains(out, `"addressCount": "18446744073709551615"`) ||
		!strings.Contains(out, `"addressCount": "256"`) {
		t.Errorf("pools\n%s", out)
	}
}
