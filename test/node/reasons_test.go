// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// notProvoked are the datapath's reasons that this test cannot provoke, with the explanation.
var notProvoked = map[datapathv1.ErrorReason]string{
	datapathv1.ErrorReason_ERROR_REASON_UNSPECIFIED:      "never sent",
	datapathv1.ErrorReason_ERROR_REASON_INTERNAL:         "a bug, or a system call that fails unexpectedly",
	datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_DELETED: "a race of two calls; tests of the core decide it",
	datapathv1.ErrorReason_ERROR_REASON_ADDRESS_IN_USE: "ipam leases an address to one owner, which LEASE_LOST " +
		"precedes",
	datapathv1.ErrorReason_ERROR_REASON_NO_CAPACITY:            "4,095 endpoints; a test of the core has fewer slots",
	datapathv1.ErrorReason_ERROR_REASON_SERVICE_EXHAUSTED:      "services of another version, which give no reason",
	datapathv1.ErrorReason_ERROR_REASON_LABELS_FROM_KUBERNETES: "needs an API server; test/k8s has one",
}

// reasons collects the reasons of the datapath's errors.
type reasons struct {
	t    *testing.T
	seen map[datapathv1.ErrorReason]bool
}

func (r *reasons) want(what string, err error, reason datapathv1.ErrorReason) {
	r.t.Helper()
	r.seen[reason] = true
	if !rpcerr.Is(err, reason) {
		r.t.Errorf("%s: %v, want reason %s", what, err, reason)
	}
}

// lease lets ipam lease addresses to an owner.
func (n *testNode) lease(t *testing.T, o *workloadv1.Owner) (addresses []string) {
	t.Helper()
	lease, err := n.ipam.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: o})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range lease.GetAllocation().GetAddresses() {
		addresses = append(addresses, a.GetAddress())
	}
	return addresses
}

// creation returns a request that the datapath accepts.
func (n *testNode) creation(t *testing.T, p pod.Pod) *datapathv1.CreateEndpointRequest {
	t.Helper()
	o := &workloadv1.Owner{ContainerId: p.Name, InterfaceName: "eth0"}
	return &datapathv1.CreateEndpointRequest{Owner: o, NetworkNamespace: p.Netns, Addresses: n.lease(t, o)}
}

// firstAnswer returns the answer of the datapath to a creation, once it has the pod ranges.
func (n *testNode) firstAnswer(t *testing.T, q *datapathv1.CreateEndpointRequest) (err error) {
	t.Helper()
	servicetest.EventuallyNil(t, "the datapath has the pod ranges", func() error {
		if _, err = n.datapath.CreateEndpoint(short(t), q); status.Code(err) == codes.Unavailable {
			return err
		}
		return nil
	})
	return err
}

func short(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestKernelReasonsOfTheDatapathAreThoseOfItsAPI provokes each documented reason in real services: an error of the core
// keeps its reason even if it is wrapped.
func TestKernelReasonsOfTheDatapathAreThoseOfItsAPI(t *testing.T) {
	t.Parallel()
	seen := map[datapathv1.ErrorReason]bool{}
	t.Run("requests", func(t *testing.T) { reasonsOfRequests(&reasons{t, seen}) })
	t.Run("settings", func(t *testing.T) { reasonsOfSettings(&reasons{t, seen}) })
	t.Run("failures", func(t *testing.T) { reasonsOfFailures(&reasons{t, seen}) })
	for number, name := range datapathv1.ErrorReason_name {
		r := datapathv1.ErrorReason(number)
		if why := notProvoked[r]; seen[r] == (why != "") {
			t.Errorf("%s: provoked %t, and listed as not provoked because of %q", name, seen[r], why)
		}
	}
}

func reasonsOfRequests(r *reasons) {
	t := r.t
	n := newNode(t)
	create := func(q *datapathv1.CreateEndpointRequest) error {
		_, err := n.datapath.CreateEndpoint(short(t), q)
		return err
	}
	web := n.creation(t, newPod(t, "web"))
	early := proto.CloneOf(web)
	early.NetworkNamespace = "/dev/null"
	if err := n.firstAnswer(t, early); err == nil {
		t.Error("an endpoint in /dev/null")
	}
	for path, reason := range map[string]datapathv1.ErrorReason{
		"/dev/null":         datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_UNUSABLE,
		"/proc/self/ns/mnt": datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_UNUSABLE,
		"/nonexistent":      datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_REMOVED,
	} {
		elsewhere := proto.CloneOf(web)
		elsewhere.NetworkNamespace = path
		err := create(elsewhere)
		r.want(path, err, reason)
		if fields := rpcerr.Fields(err); len(fields) != 1 || fields[0].GetField() != "network_namespace" {
			t.Errorf("%s: the details name %v", path, fields)
		}
	}
	web.PortMappings = []*datapathv1.PortMapping{{
		HostPort: 8080, ContainerPort: 80,
		Protocol: netv1.Protocol_PROTOCOL_TCP,
	}}
	web.Manager, web.Network = "tests", "net"
	if err := create(web); err != nil {
		t.Fatal(err)
	}
	changed := proto.CloneOf(web)
	changed.Mtu = 1400
	r.want("the same owner with another MTU", create(changed),
		datapathv1.ErrorReason_ERROR_REASON_OWNER_HAS_OTHER_ENDPOINT)
	port := n.creation(t, newPod(t, "port"))
	port.PortMappings = web.GetPortMappings()
	r.want("the host port of another", create(port), datapathv1.ErrorReason_ERROR_REASON_HOST_PORT_IN_USE)

	late := n.creation(t, newPod(t, "late"))
	late.LeaseExpireTime = timestamppb.New(time.Now().Add(-time.Second))
	r.want("a lease that has ended", create(late), datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST)
	// An error of ipam keeps its own reason.
	late.LeaseExpireTime, late.Addresses = nil, port.GetAddresses()
	if err := create(late); !rpcerr.Is(err, ipamv1.ErrorReason_ERROR_REASON_ADDRESSES_DIFFER) {
		t.Errorf("addresses that another owner has leased: %v", err)
	}

	taken := newPod(t, "taken")
	if err := pod.In(taken.Netns, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"})
	}); err != nil {
		t.Fatal(err)
	}
	r.want("a container with an eth0", create(n.creation(t, taken)),
		datapathv1.ErrorReason_ERROR_REASON_INTERFACE_NAME_TAKEN)

	absent := &workloadv1.Owner{ContainerId: "absent", InterfaceName: "eth0"}
	_, err := n.datapath.GetEndpoint(short(t), &datapathv1.GetEndpointRequest{Owner: absent})
	r.want("an owner without an endpoint", err, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_NOT_FOUND)
	_, err = n.datapath.DeleteEndpoint(short(t), &datapathv1.DeleteEndpointRequest{
		Owner:       web.GetOwner(),
		UnlessInUse: true,
	})
	r.want("a deletion unless in use", err, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_IN_USE)
	_, err = n.datapath.UpdateEndpoint(short(t), &datapathv1.UpdateEndpointRequest{
		Owner: web.GetOwner(), Manager: "others", Labels: &datapathv1.GivenLabels{},
	})
	r.want("an update by another manager", err, datapathv1.ErrorReason_ERROR_REASON_FOREIGN_MANAGER)
	_, err = n.datapath.ReclaimEndpoints(short(t), &datapathv1.ReclaimEndpointsRequest{Manager: "tests", Network: "net"})
	r.want("a reclaim of everything", err, datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	_, err = n.observer.Explain(short(t), &datapathv1.ExplainRequest{
		SourceAddress: "192.0.2.1", DestinationAddress: "192.0.2.2", Protocol: netv1.Protocol_PROTOCOL_TCP,
		DestinationPort: 80,
	})
	r.want("addresses of others", err, datapathv1.ErrorReason_ERROR_REASON_ADDRESSES_NOT_LOCAL)
	dump, err := n.datapath.DumpMap(short(t), &datapathv1.DumpMapRequest{Name: "sl_absent"})
	if err == nil {
		_, err = dump.Recv()
	}
	r.want("a map that does not exist", err, datapathv1.ErrorReason_ERROR_REASON_MAP_NOT_FOUND)
}

func reasonsOfSettings(r *reasons) {
	t := r.t
	n := newNode(t, func(o *devnode.Options) {
		o.PolicyMode = "none"
		o.Args = map[string][]string{devnode.Datapath: {"--second-interfaces=refuse", "--load-balancing-mode=off"}}
	})
	p := newPod(t, "one")
	first := n.creation(t, p)
	mapped := proto.CloneOf(first)
	mapped.PortMappings = []*datapathv1.PortMapping{{
		HostPort: 8080, ContainerPort: 80,
		Protocol: netv1.Protocol_PROTOCOL_TCP,
	}}
	err := n.firstAnswer(t, mapped)
	r.want("a host port without services", err, datapathv1.ErrorReason_ERROR_REASON_LOAD_BALANCING_OFF)
	if _, err = n.datapath.CreateEndpoint(short(t), first); err != nil {
		t.Fatal(err)
	}
	second := proto.CloneOf(first)
	second.Owner = &workloadv1.Owner{ContainerId: p.Name, InterfaceName: "eth1"}
	second.Addresses = n.lease(t, second.GetOwner())
	_, err = n.datapath.CreateEndpoint(short(t), second)
	r.want("a second interface", err, datapathv1.ErrorReason_ERROR_REASON_SECOND_INTERFACE_REFUSED)
	_, err = n.datapath.SetAuditMode(short(t), &datapathv1.SetAuditModeRequest{
		Target: &datapathv1.SetAuditModeRequest_Node{Node: true}, Enabled: true,
	})
	r.want("audit mode without policies", err, datapathv1.ErrorReason_ERROR_REASON_POLICY_MODE_NONE)
}

func reasonsOfFailures(r *reasons) {
	t := r.t
	n := newNode(t)
	kept := n.creation(t, newPod(t, "kept"))
	if err := n.firstAnswer(t, kept); err != nil {
		t.Fatal(err)
	}
	unserved, unjudged, unwritten := n.creation(t, newPod(t, "unserved")), n.creation(t, newPod(t, "unjudged")),
		n.creation(t, newPod(t, "unwritten"))
	unjudged.Labels = []*workloadv1.Label{{Source: "k8s", Key: "app", Value: "new"}}
	stop := func(service string) {
		t.Helper()
		if err := n.Stop(t.Context(), service); err != nil {
			t.Fatal(err)
		}
	}
	start := func(service string) {
		t.Helper()
		if err := n.Start(t.Context(), service); err != nil {
			t.Fatal(err)
		}
	}
	create := func(q *datapathv1.CreateEndpointRequest) error {
		_, err := n.datapath.CreateEndpoint(short(t), q)
		return err
	}
	stop(devnode.Policy)
	r.want("new labels without sluice-policy", create(unjudged), datapathv1.ErrorReason_ERROR_REASON_POLICY_UNAVAILABLE)
	start(devnode.Policy)
	stop(devnode.IPAM)
	r.want("without sluice-ipam", create(unserved), datapathv1.ErrorReason_ERROR_REASON_SERVICE_UNAVAILABLE)
	start(devnode.IPAM)

	stop(devnode.Datapath)
	var records []string
	state := n.Paths().ServiceStateDir(devnode.Datapath)
	if err := filepath.WalkDir(state, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(d.Name(), ".ready.json") {
			records = append(records, path)
		}
		return err
	}); err != nil || len(records) != 1 {
		t.Fatalf("records of the endpoint: %v, %v", records, err)
	}
	text, err := os.ReadFile(records[0])
	if err != nil {
		t.Fatal(err)
	}
	write := func(content []byte) {
		t.Helper()
		if err := os.WriteFile(records[0], content, 0o600); err != nil { // keep the owner
			t.Fatal(err)
		}
	}
	write(text[:len(text)/2])
	start(devnode.Datapath)
	r.want("a record that is cut", create(kept), datapathv1.ErrorReason_ERROR_REASON_RECORD_UNREADABLE)
	stop(devnode.Datapath)
	write(text)
	start(devnode.Datapath)

	fill := n.smallDisk(t, devnode.Datapath)
	fill()
	err = create(unwritten)
	r.want("a full disk", err, datapathv1.ErrorReason_ERROR_REASON_STORAGE_FAILED)
	if errno := rpcerr.Facts(err)["errno"]; errno != "ENOSPC" {
		t.Errorf("a full disk: errno %q", errno)
	}
}
