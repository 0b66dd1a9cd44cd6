// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"golang.org/x/sys/unix"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/kit/fault/faulttest"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/deletion"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
	"github.com/sluice-net/sluice/services/cni-shim/internal/spool"
	"github.com/sluice-net/sluice/services/cni-shim/internal/test/nodetest"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

func TestMain(m *testing.M) {
	servicetest.Main(main) // tests of several processes, or of a process's own, execute themselves
	os.Exit(m.Run())
}

// process is the same execution in a process of its own.
func (c call) process() *exec.Cmd {
	cmd := servicetest.Command()
	cmd.Env = append(cmd.Env,
		"CNI_COMMAND="+c.command, "CNI_CONTAINERID="+c.container, "CNI_IFNAME="+c.ifname,
		"CNI_NETNS="+c.netns, "CNI_ARGS="+c.args, "CNI_PATH=/opt/cni/bin",
	)
	cmd.Stdin = strings.NewReader(c.stdin)
	return cmd
}

// call is one execution of the plugin.
type call struct {
	command, container, ifname, netns, args string
	stdin                                   string
}

func (c call) run() (code uint, stdout, stderr string) {
	env := map[string]string{
		"CNI_COMMAND": c.command, "CNI_CONTAINERID": c.container, "CNI_IFNAME": c.ifname,
		"CNI_NETNS": c.netns, "CNI_ARGS": c.args, "CNI_PATH": "/opt/cni/bin",
	}
	var out, errOut bytes.Buffer
	exit := run(func(k string) string { return env[k] }, strings.NewReader(c.stdin), &out, &errOut)
	if exit == 0 {
		return 0, out.String(), errOut.String()
	}
	var e types.Error
	if err := json.Unmarshal(out.Bytes(), &e); err != nil || e.Code == 0 {
		return 9999, out.String(), errOut.String()
	}
	return e.Code, out.String(), errOut.String()
}

// config is a network configuration for the node, with more keys in JSON.
func config(n *nodetest.Node, version, more string) string {
	if more != "" {
		more = "," + more
	}
	return fmt.Sprintf(`{"cniVersion":%q,"name":"sluice","type":"sluice-cni","runDir":%q,"logFile":%q%s}`,
		version, n.RunDir, filepath.Join(n.StateDir, "cni.log"), more)
}

func add(n *nodetest.Node, ns string) call {
	return call{command: "ADD", container: "c1", ifname: "eth0", netns: ns, stdin: config(n, "1.0.0", "")}
}

// newNetns makes a network namespace under a name of its own.
func newNetns(t testing.TB) string {
	t.Helper()
	requireRoot(t)
	f, err := os.CreateTemp("", "netns")
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	path := f.Name()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	}()
	err = <-done
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path)); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func requireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes network namespaces and needs root")
	}
}

func wantCode(t *testing.T, c call, want uint) string {
	t.Helper()
	code, stdout, stderr := c.run()
	if code != want {
		t.Fatalf("%s: code %d, want %d\nstdout: %s\nstderr: %s", c.command, code, want, stdout, stderr)
	}
	return stdout
}

func wantHeld(t *testing.T, n *nodetest.Node, allocations, endpoints int) {
	t.Helper()
	a, e := n.Held()
	if a != allocations || e != endpoints {
		t.Fatalf("%d allocations and %d endpoints, want %d and %d; calls: %v", a, e, allocations, endpoints, n.Calls())
	}
}

func TestKernelAddAnswersInEachCNIVersion(t *testing.T) {
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			n, ns := nodetest.New(t), newNetns(t)
			c := add(n, ns)
			c.stdin = config(n, version, `"dns":{"nameservers":["10.96.0.10"],"search":["cluster.local"]}`)
			out := wantCode(t, c, 0)

			got := strings.ReplaceAll(out, ns, "/run/netns/pod") + "\n"
			golden := filepath.Join("testdata", "add-"+version+".json")
			if *update {
				if err := os.MkdirAll("testdata", 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("result\n%s\nwant\n%s", got, want)
			}

			// The reference library reads it back.
			r, err := create.Create(version, []byte(out))
			if err != nil {
				t.Fatalf("libcni cannot read the result: %v", err)
			}
			result, err := types100.NewResultFromResult(r)
			if err != nil {
				t.Fatal(err)
			}
			for i, ip := range result.IPs {
				if ip.Interface == nil || result.Interfaces[*ip.Interface].Sandbox != ns {
					t.Errorf("ips[%d] is not on the interface in the container: %s", i, out)
				}
			}

			c.command = "DEL"
			if out := wantCode(t, c, 0); out != "" {
				t.Errorf("DEL wrote %q to standard output", out)
			}
			wantHeld(t, n, 0, 0)
			wantCode(t, c, 0) // gone already
		})
	}
}

func TestKernelAddPassesOnWhatTheRuntimeAsksFor(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	c := add(n, ns)
	c.args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=prod;K8S_POD_NAME=web-0;K8S_POD_UID=u;K8S_POD_INFRA_CONTAINER_ID=c1;OTHER=x"
	c.stdin = config(n, "1.1.0", `"mtu":1400,"capabilities":{"labels":true,"ips":true,"mac":true,"portMappings":true,
			"io.kubernetes.cri.pod-annotations":true},
		"runtimeConfig":{"portMappings":[{"hostPort":0,"containerPort":1},
				{"hostPort":8443,"containerPort":443,"protocol":"TCP","hostIP":"192.0.2.1"},{"hostPort":53,"containerPort":53,"protocol":"udp"}],
			"labels":[{"key":"app","value":"web"}],"ips":["10.244.0.77/24","fd00:244::77"],"mac":"02:11:22:33:44:55",
			"io.kubernetes.cri.pod-annotations":{"sluice.io/labels":"tier=front, zone=a","other":"x"}},
		"args":{"cni":{"labels":[{"key":"team","value":"a b"}]}}`)
	out := wantCode(t, c, 0)
	for _, want := range []string{"10.244.0.77/32", "fd00:244::77/128", "02:11:22:33:44:55", `"mtu": 1400`} {
		if !strings.Contains(out, want) {
			t.Errorf("the result lacks %s: %s", want, out)
		}
	}
	if got := n.AskedNamespace(); got != "prod" {
		t.Errorf("addresses are requested for the namespace %q", got)
	}
	req := n.Request("c1/eth0")
	var labels []string
	for _, l := range req.GetLabels() {
		labels = append(labels, l.GetSource()+":"+l.GetKey()+"="+l.GetValue())
	}
	want := []string{
		"k8s:app=web", "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=prod", "k8s:io.kubernetes.pod.namespace=prod",
		"k8s:team=a b", "k8s:tier=front", "k8s:zone=a",
	}
	if !slices.Equal(labels, want) {
		t.Errorf("labels %q, want %q", labels, want)
	}
	if p := req.GetPod(); p.GetNamespace() != "prod" || p.GetName() != "web-0" || p.GetUid() != "u" {
		t.Errorf("pod %v, want prod/web-0 with the uid u", p)
	}
	wantPorts := []*datapathv1.PortMapping{
		{HostPort: 8443, ContainerPort: 443, Protocol: netv1.Protocol_PROTOCOL_TCP, HostIp: "192.0.2.1"},
		{HostPort: 53, ContainerPort: 53, Protocol: netv1.Protocol_PROTOCOL_UDP},
	}
	if !slices.EqualFunc(req.GetPortMappings(), wantPorts, func(a, b *datapathv1.PortMapping) bool { return proto.Equal(a, b) }) {
		t.Errorf("port mappings %v, want %v", req.GetPortMappings(), wantPorts)
	}
	if req.GetLeaseExpireTime() == nil || req.GetMtu() != 1400 || req.GetNetworkNamespace() != ns {
		t.Errorf("request %v", req)
	}
	if ids := n.RequestIDs(); ids != 1 {
		t.Errorf("%d request ids in one ADD, want 1", ids)
	}
}

func TestKernelAddWorksBehindOtherPlugins(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	prev := `"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"br0","mac":"02:00:00:00:00:09"}],
		"ips":[{"address":"192.0.2.1/24","interface":0}],"routes":[{"dst":"192.0.2.0/24"}],"dns":{"nameservers":["192.0.2.53"]}}`
	c := add(n, ns)
	c.stdin = config(n, "1.0.0", prev)
	var result types100.Result
	if err := json.Unmarshal([]byte(wantCode(t, c, 0)), &result); err != nil {
		t.Fatal(err)
	}
	if len(result.Interfaces) != 3 || result.Interfaces[0].Name != "br0" || result.Interfaces[2].Sandbox != ns {
		t.Errorf("interfaces %v", result.Interfaces)
	}
	if len(result.IPs) != 3 || *result.IPs[0].Interface != 0 || *result.IPs[1].Interface != 2 || *result.IPs[2].Interface != 2 {
		t.Errorf("ips %v", result.IPs)
	}
	if len(result.Routes) != 3 || result.DNS.Nameservers[0] != "192.0.2.53" {
		t.Errorf("routes %v, dns %v", result.Routes, result.DNS)
	}

	// A plugin before us that has connected this container already.
	other := filepath.Join(t.TempDir(), "same") // another name of the namespace
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(ns, other, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(other, unix.MNT_DETACH)
	for _, sandbox := range []string{ns, other} {
		c := add(n, ns)
		c.container = "c2"
		c.stdin = config(n, "1.0.0", fmt.Sprintf(`"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"net0","sandbox":%q}]}`, sandbox))
		wantCode(t, c, 7)
	}
	wantHeld(t, n, 1, 1)
}

// TestKernelAddWorksBehindTheLoopbackPlugin: chains of Nomad begin with the loopback plugin, whose result contains a
// device of the container.
func TestKernelAddWorksBehindTheLoopbackPlugin(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	c := add(n, ns)
	c.stdin = config(n, "1.0.0", fmt.Sprintf(`"prevResult":{"cniVersion":"1.0.0",
		"interfaces":[{"name":"lo","mac":"00:00:00:00:00:00","sandbox":%q}],
		"ips":[{"address":"127.0.0.1/8","interface":0},{"address":"::1/128","interface":0}]}`, ns))
	answer := wantCode(t, c, 0)
	var result types100.Result
	if err := json.Unmarshal([]byte(answer), &result); err != nil {
		t.Fatal(err)
	}
	if d := result.Interfaces; len(d) != 3 || d[0].Name != "lo" || d[2].Name != "eth0" || len(result.IPs) != 4 {
		t.Errorf("interfaces %v, ips %v", result.Interfaces, result.IPs)
	}
	c.command, c.stdin = "CHECK", config(n, "1.0.0", `"prevResult":`+answer)
	wantCode(t, c, 0)
	wantHeld(t, n, 1, 1)
}

// withDetails is a status as our servers make them.
func withDetails(code codes.Code, text string, details ...protoadapt.MessageV1) func(context.Context) error {
	st, err := status.New(code, text).WithDetails(details...)
	if err != nil {
		panic(err)
	}
	return func(context.Context) error { return st.Err() }
}

// reasoned is an answer with a reason, as our servers give it.
func reasoned(code codes.Code, reason protoreflect.Enum, text string) func(context.Context) error {
	return func(context.Context) error { return rpcerr.New(code, rpcerr.Of(reason), errors.New(text)) }
}

func violation(field string) *errdetails.BadRequest {
	return &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: "is wrong"}}}
}

func TestKernelAddGivesEveryFailureItsCodeAndLeavesNothing(t *testing.T) {
	later := &errdetails.RetryInfo{RetryDelay: durationpb.New(1)}
	ns := newNetns(t)
	for name, c := range map[string]struct {
		fail func(context.Context) error
		want uint
	}{
		"a field of the configuration":    {withDetails(codes.InvalidArgument, "bad", violation("mtu")), 7},
		"the namespace":                   {withDetails(codes.InvalidArgument, "bad", violation("network_namespace")), 4},
		"the interface name":              {withDetails(codes.InvalidArgument, "bad", violation("owner.interface_name")), 4},
		"the interface name is taken":     {reasoned(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_INTERFACE_NAME_TAKEN, "taken"), 4},
		"a second interface":              {reasoned(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_SECOND_INTERFACE_REFUSED, "has one"), 4},
		"a namespace that is removed":     {reasoned(codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_REMOVED, "removed"), 4},
		"a record that cannot be read":    {reasoned(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_RECORD_UNREADABLE, "corrupt"), 11},
		"a lost lease":                    {reasoned(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST, "gone"), 11},
		"a lease that ipam does not know": {reasoned(codes.FailedPrecondition, ipamv1.ErrorReason_ERROR_REASON_ALLOCATION_NOT_FOUND, "gone"), 11},
		"other addresses":                 {withDetails(codes.AlreadyExists, "other"), 7},
		"a lost race":                     {withDetails(codes.Aborted, "race"), 11},
		"full":                            {withDetails(codes.ResourceExhausted, "full", later), 11},
		"a dependency":                    {withDetails(codes.Unavailable, "etcd does not answer", later), 11},
		"too slow":                        {withDetails(codes.DeadlineExceeded, "slow"), 11},
		"too old":                         {withDetails(codes.Unimplemented, "what"), 1},
		"not root":                        {withDetails(codes.PermissionDenied, "no"), 102},
		"a bug":                           {withDetails(codes.Internal, "panic"), 100},
		"unheard of":                      {withDetails(codes.DataLoss, "lost"), 100},
	} {
		for _, method := range []string{"Allocate", "CreateEndpoint"} {
			if name == "other addresses" && method == "CreateEndpoint" {
				continue // another endpoint, of a second ADD
			}
			t.Run(method+" "+name, func(t *testing.T) {
				n := nodetest.New(t)
				n.Fail(method, c.fail)
				once := add(n, ns)
				once.stdin = config(n, "1.0.0", `"timeout":"1s"`) // "full" may become "free"
				out := wantCode(t, once, c.want)
				if !strings.Contains(out, c.fail(context.Background()).(interface{ GRPCStatus() *status.Status }).GRPCStatus().Message()) {
					t.Errorf("the answer does not say why: %s", out)
				}
				wantHeld(t, n, 0, 0)
			})
		}
	}
}

// TestKernelAddUndoesWhatItHasNoAnswerAbout: the plugin also undoes calls that succeeded although it lost their
// answers.
func TestKernelAddUndoesWhatItHasNoAnswerAbout(t *testing.T) {
	ns := newNetns(t)
	n := nodetest.New(t)
	n.FailAfter("CreateEndpoint", withDetails(codes.Internal, "broke off"))
	wantCode(t, add(n, ns), 100)
	wantHeld(t, n, 0, 0)

	// While the datapath cannot confirm that the addresses are unused, they stay leased and are not given to another
	// owner.
	n = nodetest.New(t)
	n.FailAfter("CreateEndpoint", withDetails(codes.Internal, "broke off"))
	n.Fail("DeleteEndpoint", withDetails(codes.Internal, "broke off"))
	wantCode(t, add(n, ns), 100)
	wantHeld(t, n, 1, 1)
	if slices.Contains(n.Calls(), "Release") {
		t.Errorf("addresses that may be in use were released: %v", n.Calls())
	}
}

func TestKernelAddRenewsItsLeaseWhileItWaits(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	n.Lease = time.Second / 2
	full := withDetails(codes.ResourceExhausted, "4 calls running, 8 waiting", &errdetails.RetryInfo{RetryDelay: durationpb.New(20 * time.Millisecond)})
	n.Fail("CreateEndpoint", func(ctx context.Context) error {
		renewed := 0
		for _, method := range n.Calls() {
			if method == "Allocate" {
				renewed++
			}
		}
		if renewed < 3 {
			return full(ctx)
		}
		return nil
	})
	wantCode(t, add(n, ns), 0)
}

// TestKernelAddLeasesAgainWhatWasLost: if a service becomes unavailable, the datapath rolls the creation back and
// releases the lease, so the plugin allocates again.
func TestKernelAddLeasesAgainWhatWasLost(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	away := withDetails(codes.Unavailable, "identity does not answer", &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
	calls := 0
	n.Fail("CreateEndpoint", func(ctx context.Context) error {
		if calls++; calls > 2 {
			return nil
		}
		n.Forget("c1/eth0")
		return away(ctx)
	})
	wantCode(t, add(n, ns), 0)
	wantHeld(t, n, 1, 1)
}

// TestKernelAddNamesTheServiceForWhichItWaited: the error contains the service, and not the leases that were released
// with each rolled-back creation.
func TestKernelAddNamesTheServiceForWhichItWaited(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	away := withDetails(codes.Unavailable, "etcd does not answer", &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
	calls := 0
	n.Fail("CreateEndpoint", func(ctx context.Context) error {
		switch calls++; {
		case calls > 4: // it waits for etcd
			<-ctx.Done()
			return ctx.Err()
		case calls%2 == 0: // it looks for the lease
			return nil
		}
		n.Forget("c1/eth0")
		return away(ctx)
	})
	c := add(n, ns)
	c.stdin = config(n, "1.0.0", `"timeout":"3s"`)
	if out := wantCode(t, c, 11); !strings.Contains(out, "etcd does not answer") {
		t.Errorf("ADD ends with %s", out)
	}
}

// TestKernelAddExchangesAddressesOfALiveEndpoint: an ipam that lost its state allocates addresses of live endpoints.
// ADD requests other addresses, unless they are fixed; if an earlier endpoint of the same owner may have the addresses,
// ADD deletes it first.
func TestKernelAddExchangesAddressesOfALiveEndpoint(t *testing.T) {
	inUse := rpcerr.New(codes.Aborted, rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_ADDRESS_IN_USE),
		errors.New("refused"), rpcerr.Retry(time.Millisecond))
	calls := func(n *nodetest.Node, method string) (count int) {
		for _, m := range n.Calls() {
			if m == method {
				count++
			}
		}
		return count
	}
	t.Run("three times", func(t *testing.T) {
		n, ns := nodetest.New(t), newNetns(t)
		n.Fail("CreateEndpoint", func(context.Context) error {
			if calls(n, "CreateEndpoint") <= 3 {
				return inUse
			}
			return nil
		})
		wantCode(t, add(n, ns), 0)
		wantHeld(t, n, 1, 1)
		if a := n.Request("c1/eth0").GetAddresses()[0]; a != "10.244.0.5" {
			t.Errorf("the endpoint has %v, want the fourth address, 10.244.0.5", a)
		}
		if got := calls(n, "Release"); got != 3 {
			t.Errorf("%d releases, want 3: %v", got, n.Calls())
		}
	})
	t.Run("fixed", func(t *testing.T) {
		n, ns := nodetest.New(t), newNetns(t)
		n.Fail("CreateEndpoint", func(context.Context) error { return inUse })
		c := add(n, ns)
		c.stdin = config(n, "1.0.0", `"timeout":"1s","runtimeConfig":{"ips":["10.244.0.9/24"]},"capabilities":{"ips":true}`)
		wantCode(t, c, 11)
		if got := calls(n, "Release"); got != 1 {
			t.Errorf("%d releases, want only the undo's release: %v", got, n.Calls())
		}
	})
	t.Run("open", func(t *testing.T) {
		n, ns := nodetest.New(t), newNetns(t)
		n.Fail("CreateEndpoint", func(context.Context) error {
			if calls(n, "CreateEndpoint") == 1 {
				return status.Error(codes.Unavailable, "the connection broke")
			}
			return inUse
		})
		c := add(n, ns)
		c.stdin = config(n, "1.0.0", `"timeout":"1s"`)
		wantCode(t, c, 11)
		if i, j := slices.Index(n.Calls(), "Release"), slices.Index(n.Calls(), "DeleteEndpoint"); i >= 0 && i < j {
			t.Errorf("addresses that its endpoint may have were released before it was deleted: %v", n.Calls())
		}
	})
	t.Run("open once", func(t *testing.T) {
		n, ns := nodetest.New(t), newNetns(t)
		n.Fail("CreateEndpoint", func(context.Context) error {
			switch calls(n, "CreateEndpoint") {
			case 1:
				return status.Error(codes.Unavailable, "the connection broke")
			case 2:
				return inUse
			}
			return nil
		})
		wantCode(t, add(n, ns), 0)
		wantHeld(t, n, 1, 1)
		if i, j := slices.Index(n.Calls(), "Release"), slices.Index(n.Calls(), "DeleteEndpoint"); j < 0 || i < j {
			t.Errorf("its endpoint was not deleted before the addresses were released: %v", n.Calls())
		}
	})
}

// TestKernelAddUndoesAnEarlierRequestThatWasNotAnswered: a refusal of a repeated request does not show whether the
// first request, whose answer was lost, has succeeded.
func TestKernelAddUndoesAnEarlierRequestThatWasNotAnswered(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	lost := false
	n.FailAfter("CreateEndpoint", func(context.Context) error {
		lost = true
		return status.Error(codes.Unavailable, "the connection broke")
	})
	full := withDetails(codes.ResourceExhausted, "4 calls running, 8 waiting", &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Minute)})
	n.Fail("CreateEndpoint", func(ctx context.Context) error {
		if lost {
			return full(ctx)
		}
		return nil
	})
	wantCode(t, add(n, ns), 11)
	wantHeld(t, n, 0, 0)
}

// TestKernelSecondAddIsRefused: the CNI specification requires: "If an interface of the requested name already exists
// in the container, the plugin MUST return with an error." The first interface must stay.
func TestKernelSecondAddIsRefused(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	first := wantCode(t, add(n, ns), 0)
	other := add(n, ns)
	other.stdin = config(n, "1.0.0", `"mtu":1400`)
	for name, c := range map[string]call{"the same": add(n, ns), "with other content": other} {
		if out := wantCode(t, c, 4); !strings.Contains(out, "eth0") || !strings.Contains(out, "DEL") {
			t.Errorf("%s: the answer does not say what to do: %s", name, out)
		}
		wantHeld(t, n, 1, 1)
	}
	check := add(n, ns)
	check.command, check.stdin = "CHECK", config(n, "1.0.0", `"prevResult":`+first)
	wantCode(t, check, 0)

	// The namespace has gone, and its device with it, without a DEL: podman gives
	// its containers the same id after a crash. The datapath makes a new endpoint.
	n.Renew("c1/eth0")
	wantCode(t, add(n, ns), 0)
	wantHeld(t, n, 1, 1)

	// An answer that was lost inside one ADD is no second ADD.
	fresh := add(n, ns)
	fresh.container = "c2"
	lost := 0
	n.FailAfter("CreateEndpoint", func(context.Context) error {
		if lost++; lost > 1 {
			return nil
		}
		return status.Error(codes.Unavailable, "the connection broke")
	})
	wantCode(t, fresh, 0)
	wantHeld(t, n, 2, 2)
}

// TestKernelAddLeavesAnEarlierEndpointAlone: an ADD repeated by mistake may fail, but must not take down the first
// one's.
func TestKernelAddLeavesAnEarlierEndpointAlone(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	wantCode(t, add(n, ns), 0)
	n.Fail("CreateEndpoint", withDetails(codes.Internal, "broke off"))
	wantCode(t, add(n, ns), 100)
	wantHeld(t, n, 1, 1)
}

func TestKernelAddUndoesWhenTheResultCannotBeWritten(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	c := add(n, ns)
	env := map[string]string{"CNI_COMMAND": "ADD", "CNI_CONTAINERID": c.container, "CNI_IFNAME": c.ifname, "CNI_NETNS": ns}
	var stderr bytes.Buffer
	if exit := run(func(k string) string { return env[k] }, strings.NewReader(c.stdin), brokenWriter{}, &stderr); exit != 1 {
		t.Fatalf("exit %d", exit)
	}
	if !strings.Contains(stderr.String(), "write the result") {
		t.Errorf("standard error: %s", stderr.String())
	}
	wantHeld(t, n, 0, 0)
}

// TestKernelAddUndoesWhenTheRuntimeHasGone simulates a runtime that died: standard output and standard error of the
// plugin have no reader, so that a write would end the plugin.
func TestKernelAddUndoesWhenTheRuntimeHasGone(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r.Close()
	cmd := add(n, ns).process()
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Run()
	if cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("the plugin ended with %v, want exit status 1", err)
	}
	wantHeld(t, n, 0, 0)
}

// TestKernelGODEBUGChangesNothing: every verb behaves the same with GODEBUG set, because a runtime passes its own
// environment to the plugin.
func TestKernelGODEBUGChangesNothing(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	for _, settings := range []string{
		"fips140=on", "fips140=only", "http2client=0,http2debug=2,netdns=cgo", "asyncpreemptoff=1,gcstoptheworld=2,madvdontneed=1",
		"cpu.all=off", "nonsense=1,=,,x",
	} {
		for _, command := range []string{"ADD", "DEL"} {
			c := add(n, ns)
			c.command = command
			cmd := c.process()
			cmd.Env = append(cmd.Env, "GODEBUG="+settings)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s with %s: %v: %s", command, settings, err, out)
			}
		}
	}
	wantHeld(t, n, 0, 0)
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestKernelAddWaitsForAServiceThatComesBack(t *testing.T) {
	ns := newNetns(t)
	for _, service := range []string{"ipam", "datapath"} {
		n := nodetest.New(t)
		n.Stop(service)
		done := make(chan uint)
		go func() {
			code, _, _ := add(n, ns).run()
			done <- code
		}()
		n.Start(t, service)
		if code := <-done; code != 0 {
			t.Errorf("%s came back; code %d", service, code)
		}
		wantHeld(t, n, 1, 1)
	}
}

func TestKernelAddSaysWhichServiceIsAway(t *testing.T) {
	ns := newNetns(t)
	for _, service := range []string{"ipam", "datapath"} {
		n := nodetest.New(t)
		n.Stop(service)
		c := add(n, ns)
		c.stdin = config(n, "1.0.0", `"timeout":"1s"`)
		if out := wantCode(t, c, 11); !strings.Contains(out, service+".sock") {
			t.Errorf("the answer does not name %s: %s", service, out)
		}
		wantHeld(t, n, 0, 0) // nothing was sent to the datapath, so the lease is free to go
	}
}

func TestKernelAddEndsAtItsTimeout(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	n.Fail("CreateEndpoint", func(ctx context.Context) error {
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	})
	c := add(n, ns)
	c.stdin = config(n, "1.0.0", `"timeout":"1s"`)
	wantCode(t, c, 11)
	wantHeld(t, n, 0, 0)
}

// startSleeper starts a process in a network namespace of its own and returns the
// path by which a process names it.
func startSleeper(t *testing.T) string {
	t.Helper()
	requireRoot(t)
	sleeper := exec.Command("sleep", "600")
	sleeper.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		sleeper.Process.Kill()
		sleeper.Wait() //nolint:errcheck // it was killed
	})
	return fmt.Sprintf("/proc/%d/ns/net", sleeper.Process.Pid)
}

func TestKernelNamespaceOfAProcessIsBoundUntilDel(t *testing.T) {
	path := startSleeper(t)
	n := nodetest.New(t)
	bound := netns.NamesOf(n.RunDir, "sluice").Path("c1/eth0")
	out := wantCode(t, add(n, path), 0)
	if got := n.Request("c1/eth0").GetNetworkNamespace(); got != bound || !netns.Same(got, path) {
		t.Errorf("the datapath was given %s, want %s", got, bound)
	}
	if !strings.Contains(out, path) {
		t.Errorf("the result does not name the runtime's path: %s", out)
	}
	check := add(n, path)
	check.command = "CHECK"
	check.stdin = config(n, "1.0.0", `"prevResult":`+out)
	wantCode(t, check, 0)

	del := add(n, path)
	del.command = "DEL"
	wantCode(t, del, 0)
	if _, err := os.Lstat(bound); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there after DEL: %v", bound, err)
	}

	// A failed ADD unbinds, and GC finds what a killed one left.
	n.Fail("Allocate", withDetails(codes.ResourceExhausted, "full"))
	wantCode(t, add(n, path), 11)
	if _, err := os.Lstat(bound); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there after a failed ADD: %v", bound, err)
	}
	n.Fail("Allocate", nil)
	for _, id := range []string{"keep", "leave"} {
		c := add(n, path)
		c.container = id
		wantCode(t, c, 0)
	}
	gc := call{command: "GC", stdin: config(n, "1.1.0", `"cni.dev/valid-attachments":[{"containerID":"keep","ifname":"eth0"}]`)}
	wantCode(t, gc, 0)
	wantHeld(t, n, 1, 1)
	names := netns.NamesOf(n.RunDir, "sluice")
	if _, err := os.Lstat(names.Path("leave/eth0")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("GC left a namespace: %v", err)
	}
	if !netns.Same(names.Path("keep/eth0"), path) {
		t.Error("GC unbound the namespace of a valid attachment")
	}
	gc.stdin = config(n, "1.1.0", `"cni.dev/valid-attachments":null`)
	wantCode(t, gc, 0)
	wantHeld(t, n, 0, 0)
}

// TestKernelResultOfASecondInterfaceHasNoDefaultRoutes: the default routes stay with the first interface.
func TestKernelResultOfASecondInterfaceHasNoDefaultRoutes(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	for _, c := range []struct {
		ifname string
		routes int
	}{{"eth0", 2}, {"net1", 0}} {
		a := add(n, ns)
		a.ifname = c.ifname
		var result types100.Result
		if err := json.Unmarshal([]byte(wantCode(t, a, 0)), &result); err != nil {
			t.Fatal(err)
		}
		if len(result.IPs) != 2 || len(result.Routes) != c.routes {
			t.Errorf("%s has %d addresses and routes %v, want 2 and %d", c.ifname, len(result.IPs), result.Routes, c.routes)
		}
	}
}

// TestKernelGCStaysWithinItsNetwork: a node may have two runtimes, each with its own network. GC of one runtime only
// receives the attachments of its own network, and must not delete the other's.
func TestKernelGCStaysWithinItsNetwork(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	in := func(c call, network string) call {
		c.stdin = strings.Replace(c.stdin, `"name":"sluice"`, `"name":"`+network+`"`, 1)
		return c
	}
	for _, network := range []string{"k8s", "podman"} {
		for _, id := range []string{"a", "b"} {
			c := in(add(n, ns), network)
			c.container = network + id
			wantCode(t, c, 0)
		}
	}
	// Create mounts as for containers whose namespaces need a name: of the other network, of an earlier version, and
	// of an ADD that was killed.
	ours, theirs := netns.NamesOf(n.RunDir, "k8s"), netns.NamesOf(n.RunDir, "podman")
	if err := os.Mkdir(filepath.Dir(ours.Path("")), 0o755); err != nil { //nolint:gosec // as Bind does
		t.Fatal(err)
	}
	stay := []string{ours.Path("k8sa/eth0"), theirs.Path("podmana/eth0"), theirs.Path("killed/eth0"), theirs.EarlierPath("podmanb/eth0")}
	leave := []string{ours.Path("k8sb/eth0"), ours.Path("killed/eth0"), ours.EarlierPath("k8sb/eth0")}
	for _, path := range slices.Concat(stay, leave) {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	gc := func(network, valid string) call {
		return in(call{command: "GC", stdin: config(n, "1.1.0", `"cni.dev/valid-attachments":`+valid)}, network)
	}
	wantCode(t, gc("other", `[]`), 0)
	wantHeld(t, n, 4, 4)
	wantCode(t, gc("k8s", `[{"containerID":"k8sa","ifname":"eth0"}]`), 0)
	wantHeld(t, n, 3, 3)
	for _, path := range stay {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("GC of another network: %v", err)
		}
	}
	for _, path := range leave {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("GC left %s: %v", path, err)
		}
	}
	wantCode(t, gc("k8s", `[]`), 0)
	wantHeld(t, n, 2, 2)
	del := in(add(n, ns), "podman")
	del.command, del.container = "DEL", "podmanb"
	wantCode(t, del, 0)
	if _, err := os.Lstat(theirs.EarlierPath("podmanb/eth0")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("DEL left the mount of an earlier version: %v", err)
	}
}

func TestKernelHostileNamespacesAreRefused(t *testing.T) {
	n := nodetest.New(t)
	requireRoot(t)
	dir := t.TempDir()
	file, fifo, link := filepath.Join(dir, "file"), filepath.Join(dir, "fifo"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), unix.Mkfifo(fifo, 0o600), os.Symlink("/proc/thread-self/ns/net", link)); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"missing":                 filepath.Join(dir, "none"),
		"a file":                  file,
		"a FIFO":                  fifo,
		"a directory":             dir,
		"a device":                "/dev/null",
		"our own":                 "/proc/self/ns/net",
		"our own by a link":       link,
		"of another kind":         "/proc/1/ns/mnt",
		"elsewhere in /proc":      "/proc/1/root/etc/passwd",
		"behind ..":               "/run/../proc/self/ns/net",
		"a process that is not":   "/proc/4194305/ns/net",
		"relative":                "run/netns/x",
		"not text":                "/run/netns/\xff",
		"too long":                "/" + strings.Repeat("x", 5000),
		"empty":                   "",
		"a number beyond an int":  "/proc/99999999999999999999/ns/net",
		"the root of the machine": "/",
	} {
		if code, out, _ := add(n, path).run(); code != 4 {
			t.Errorf("%s: code %d, want 4: %s", name, code, out)
		}
	}
	wantHeld(t, n, 0, 0)
	if calls := n.Calls(); len(calls) > 0 {
		t.Errorf("services were called: %v", calls)
	}
}

// c1 is the owner of most tests.
var c1 = workload.Owner{ContainerID: "c1", Interface: "eth0"}

func TestDelSpoolsWhileTheDatapathIsAway(t *testing.T) {
	n := nodetest.New(t)
	n.Stop("datapath")
	del := call{command: "DEL", container: "c1", ifname: "eth0", stdin: config(n, "1.0.0", "")}
	wantCode(t, del, 0)
	wantCode(t, del, 0)
	dir := deletion.Dir(n.StateDir)
	b, err := os.ReadFile(filepath.Join(dir, c1.Key()))
	if err != nil {
		t.Fatal(err)
	}
	if e, err := deletion.Parse(c1.Key(), b); err != nil || e.Owner != c1 {
		t.Errorf("entry %s: %v", b, err)
	}
	// Without its socket, too: the node has just booted.
	if err := os.RemoveAll(n.RunDir); err != nil {
		t.Fatal(err)
	}
	del.container = "c2"
	wantCode(t, del, 0)

	for i := 2; i < spool.Max; i++ {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%064x", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, del, 0) // it is there already
	del.container = "c3"
	wantCode(t, del, 11)
}

// TestKernelDelAsksADatapathThatCameUpMeanwhile: a datapath that starts after the connection was refused, and before
// the entry is written, may have read the spool already. After DEL, the container would keep its traffic until the
// spool is read again.
func TestKernelDelAsksADatapathThatCameUpMeanwhile(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	wantCode(t, add(n, ns), 0)
	n.Stop("datapath")
	del := add(n, ns)
	del.command = "DEL"
	cmd := del.process()
	controller := faulttest.New(t, cmd)
	release := controller.BlockAt("cni/del/spooled", 0)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	controller.Started()
	if err := controller.WaitHits(t.Context(), "cni/del/spooled", 1); err != nil {
		t.Fatal(err)
	}
	if waits, err := spool.Has(deletion.Dir(n.StateDir), c1); err != nil || !waits {
		t.Errorf("the entry: %v, %v", waits, err)
	}
	n.Start(t, "datapath")
	release()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("DEL: %v", err)
	}
	wantHeld(t, n, 0, 0)
	if waits, err := spool.Has(deletion.Dir(n.StateDir), c1); err != nil || waits {
		t.Errorf("the entry that was carried out: %v, %v", waits, err)
	}
}

// TestKernelFailedDelKeepsTheNamespace: the network namespace, and the device that the datapath still has to isolate,
// may only exist because of the mount.
func TestKernelFailedDelKeepsTheNamespace(t *testing.T) {
	path := startSleeper(t)
	n := nodetest.New(t)
	wantCode(t, add(n, path), 0)
	bound := netns.NamesOf(n.RunDir, "sluice").Path("c1/eth0")
	del := add(n, path)
	del.command, del.stdin = "DEL", config(n, "1.0.0", `"timeout":"1s"`)
	for _, code := range []codes.Code{codes.Internal, codes.DeadlineExceeded, codes.Unavailable} {
		n.Fail("DeleteEndpoint", withDetails(code, "no"))
		if got, out, _ := del.run(); got == 0 {
			t.Errorf("DEL that %s refused succeeded: %s", code, out)
		}
		if !netns.Same(bound, path) {
			t.Fatalf("DEL that failed with %s unbound the namespace", code)
		}
	}
	n.Fail("DeleteEndpoint", nil)
	wantCode(t, del, 0)
	if _, err := os.Lstat(bound); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there after DEL: %v", bound, err)
	}
}

// TestDelSaysWhyItWasRefusedThoughTheLastCallIsLate: the last of several calls ends with the verb's timeout, and the
// error is the datapath's earlier answer.
func TestDelSaysWhyItWasRefusedThoughTheLastCallIsLate(t *testing.T) {
	n := nodetest.New(t)
	refuse := withDetails(codes.Unavailable, "no space left on device",
		&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
	var calls atomic.Int32
	n.Fail("DeleteEndpoint", func(ctx context.Context) error {
		if calls.Add(1) == 1 {
			return refuse(ctx)
		}
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	})
	c := call{command: "DEL", container: "c1", ifname: "eth0", stdin: config(n, "1.0.0", `"timeout":"2s"`)}
	if out := wantCode(t, c, 11); !strings.Contains(out, "no space left on device") || calls.Load() != 2 {
		t.Errorf("after %d calls: %s", calls.Load(), out)
	}
}

// TestDelWithAWrongRunDirIsNotLost: no datapath uses the directory in runDir, so the plugin fails and the runtime must
// repeat the deletion.
func TestDelWithAWrongRunDirIsNotLost(t *testing.T) {
	n := nodetest.New(t)
	for name, dirs := range map[string]string{
		"of no instance":        filepath.Dir(n.RunDir) + "/other",
		"of a removed instance": filepath.Dir(n.RunDir) + "/left",
	} {
		if err := os.MkdirAll(filepath.Join(filepath.Dir(n.StateDir), "left", "ipam"), 0o755); err != nil {
			t.Fatal(err)
		}
		del := call{command: "DEL", container: "c1", ifname: "eth0", stdin: fmt.Sprintf(`{"cniVersion":"1.0.0","name":"sluice","runDir":%q,"logFile":""}`, dirs)}
		if out := wantCode(t, del, 11); !strings.Contains(out, "does not exist") || !strings.Contains(out, "runDir") {
			t.Errorf("%s: the answer does not say what is wrong: %s", name, out)
		}
		if _, err := os.Stat(filepath.Join(filepath.Dir(n.StateDir), filepath.Base(dirs), "cni")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: a spool was made: %v", name, err)
		}
	}
}

// TestKernelAddCarriesOutASpooledDeletionFirst: a datapath that missed the entry would, at its next start, delete the
// container's new endpoint.
func TestKernelAddCarriesOutASpooledDeletionFirst(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	wantCode(t, add(n, ns), 0)
	n.Stop("datapath")
	del := add(n, ns)
	del.command = "DEL"
	wantCode(t, del, 0)
	early := add(n, ns)
	early.stdin = config(n, "1.0.0", `"timeout":"1s"`)
	wantCode(t, early, 11) // not before the deletion is done
	n.Start(t, "datapath")

	again := add(n, ns)
	again.stdin = config(n, "1.0.0", `"mtu":1400`) // other content than the one that was deleted
	wantCode(t, again, 0)
	wantHeld(t, n, 1, 1)
	waits, err := spool.Has(deletion.Dir(n.StateDir), c1)
	if err != nil || waits {
		t.Errorf("the deletion still waits (%v)", err)
	}
	n.Stop("datapath")
	wantCode(t, del, 0)
	n.Start(t, "datapath")
	wantCode(t, del, 0) // the runtime repeats it
	if waits, err := spool.Has(deletion.Dir(n.StateDir), c1); err != nil || waits {
		t.Errorf("the deletion still waits (%v)", err)
	}
}

func TestDelDoesNotSpoolWhatTheDatapathRefuses(t *testing.T) {
	n := nodetest.New(t)
	del := call{command: "DEL", container: "c1", ifname: "eth0", netns: "/gone", stdin: config(n, "1.0.0", `"timeout":"1s","prevResult":7,"unknown":1`)}
	for code, want := range map[codes.Code]uint{codes.NotFound: 0, codes.Internal: 100, codes.DeadlineExceeded: 11, codes.Unavailable: 11} {
		n.Fail("DeleteEndpoint", withDetails(code, "no"))
		wantCode(t, del, want)
	}
	if left, err := os.ReadDir(deletion.Dir(n.StateDir)); err != nil || len(left) > 0 {
		t.Errorf("something was spooled: %v, %v", left, err)
	}
}

func TestKernelCheckFindsDifferences(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	result := wantCode(t, add(n, ns), 0)
	check := add(n, ns)
	check.command = "CHECK"
	for _, version := range []string{"0.4.0", "1.0.0", "1.1.0"} {
		check.stdin = config(n, version, `"prevResult":`+result)
		wantCode(t, check, 0)
	}
	check.stdin = config(n, "0.3.1", `"prevResult":`+result)
	wantCode(t, check, 1)
	check.stdin = config(n, "1.0.0", "")
	wantCode(t, check, 7)
	check.stdin = config(n, "1.0.0", `"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"eth9","sandbox":"/x"}]}`)
	wantCode(t, check, 7)

	check.stdin = config(n, "1.0.0", `"prevResult":`+result)
	n.SetDifferences(&datapathv1.Difference{Subject: "filter", Key: "sl0123456789a", Want: "sluice_from_pod"})
	if out := wantCode(t, check, 101); !strings.Contains(out, "filter sl0123456789a: want sluice_from_pod, have nothing") {
		t.Errorf("answer %s", out)
	}
	n.SetDifferences()
	check.stdin = config(n, "1.0.0", `"prevResult":`+strings.ReplaceAll(result, "10.244.0.", "10.244.9."))
	wantCode(t, check, 101)
	check.container = "c9"
	wantCode(t, check, 101)
	n.Stop("datapath")
	wantCode(t, check, 11)
}

// TestStatusSaysWhatSuffersThoughTheClockWasSetBack: the time of the first failure is stored in a file. If it were in
// the future, STATUS would not report the failure until that time.
func TestStatusSaysWhatSuffersThoughTheClockWasSetBack(t *testing.T) {
	n := nodetest.New(t)
	c := call{command: "STATUS", stdin: config(n, "1.1.0", "")}
	n.Stop("ipam")
	wantCode(t, c, 0)
	path := filepath.Join(n.RunDir, "cni-unable")
	ahead := time.Now().Add(10 * 365 * 24 * time.Hour)
	if err := os.Chtimes(path, ahead, ahead); err != nil {
		t.Fatal(err)
	}
	wantCode(t, c, 0)
	st, err := os.Stat(path)
	if err != nil || st.ModTime().After(time.Now()) {
		t.Fatalf("since when no ADD works: %v, %v; not before now", st, err)
	}
	ago := st.ModTime().Add(-61 * time.Second)
	if err := os.Chtimes(path, ago, ago); err != nil {
		t.Fatal(err)
	}
	wantCode(t, c, 50)
}

func TestStatusSaysWhatSuffers(t *testing.T) {
	n := nodetest.New(t)
	c := call{command: "STATUS", stdin: config(n, "1.1.0", "")}
	wantCode(t, c, 0)
	old := c
	old.stdin = config(n, "1.0.0", "")
	wantCode(t, old, 1)

	// wantLater is an answer that comes only when no ADD has worked for a while.
	wantLater := func(code uint) string {
		t.Helper()
		_ = os.Remove(filepath.Join(n.RunDir, "cni-unable"))
		wantCode(t, c, 0)
		ago := time.Now().Add(-61 * time.Second)
		if err := os.Chtimes(filepath.Join(n.RunDir, "cni-unable"), ago, ago); err != nil {
			t.Fatal(err)
		}
		return wantCode(t, c, code)
	}
	problem := &statusv1.ServiceStatus{Problems: []*statusv1.Problem{{Text: "identity does not answer"}}}
	n.SetStatus(&datapathv1.GetStatusResponse{Service: problem})
	if out := wantLater(50); !strings.Contains(out, "identity does not answer") {
		t.Errorf("answer %s", out)
	}
	n.SetStatus(&datapathv1.GetStatusResponse{Endpoints: []*datapathv1.EndpointStateCount{
		{State: datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_IDENTITY, Count: 2},
	}})
	wantLater(51)
	// known labels are served, and that starts again
	n.SetStatus(&datapathv1.GetStatusResponse{Service: problem, KnownAddReady: true})
	wantCode(t, c, 0)
	if _, err := os.Stat(filepath.Join(n.RunDir, "cni-unable")); err == nil {
		t.Error("it is remembered that no ADD worked")
	}
	n.Health.SetServingStatus("sluice.ipam.v1.IPAMService", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	wantLater(50)
	n.Stop("ipam")
	wantLater(50)
	n.Stop("datapath")
	wantLater(50)
}

func TestGCWantsTheList(t *testing.T) {
	n := nodetest.New(t)
	for more, want := range map[string]uint{
		``:                               7,
		`"cni.dev/valid-attachments":{}`: 7,
		`"cni.dev/valid-attachments":[{"containerID":"..","ifname":"eth0"}]`:           7,
		`"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0/../../../x"}]`: 7,
		`"cni.dev/valid-attachments":[]`:                                               0,
	} {
		wantCode(t, call{command: "GC", stdin: config(n, "1.1.0", more)}, want)
	}
	wantCode(t, call{command: "GC", stdin: config(n, "1.0.0", `"cni.dev/valid-attachments":[]`)}, 1)
	n.Stop("datapath")
	wantCode(t, call{command: "GC", stdin: config(n, "1.1.0", `"cni.dev/valid-attachments":[]`)}, 11)
}

// TestPluginLinksOnlyWhatItNeeds: the initialisation of every package takes time at each start.
func TestPluginLinksOnlyWhatItNeeds(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range strings.Fields(string(out)) {
		for _, barred := range []string{
			"google.golang.org/", "buf.build/", "github.com/sluice-net/sluice/proto", "github.com/sluice-net/sluice/kit/rpc",
			"github.com/containernetworking/", "net", "crypto/rand", "crypto/tls", "regexp", "html",
		} {
			if dep == barred || strings.HasPrefix(dep, strings.TrimSuffix(barred, "/")+"/") && dep != "net/netip" {
				t.Errorf("the plugin links %s", dep)
			}
		}
	}
}

func TestVersionNeedsNoInput(t *testing.T) {
	code, out, _ := call{command: "VERSION"}.run()
	if want := `{"cniVersion":"1.1.0","supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]}` + "\n"; code != 0 || out != want {
		t.Errorf("code %d, %s; want %s", code, out, want)
	}
}

func TestKernelLogTellsOfEachVerbOnce(t *testing.T) {
	n, ns := nodetest.New(t), newNetns(t)
	full := withDetails(codes.ResourceExhausted, "4 calls running, 8 waiting", &errdetails.RetryInfo{RetryDelay: durationpb.New(20 * time.Millisecond)})
	calls := 0
	n.Fail("CreateEndpoint", func(ctx context.Context) error {
		if calls++; calls == 1 {
			return full(ctx)
		}
		return nil
	})
	result := wantCode(t, add(n, ns), 0)
	verb := func(command, more string, want uint) {
		c := add(n, ns)
		c.command, c.stdin = command, config(n, "1.1.0", more)
		wantCode(t, c, want)
	}
	verb("CHECK", `"prevResult":`+result, 0) // changes nothing and is not logged
	verb("ADD", "", 4)
	verb("DEL", "", 0)
	verb("GC", `"cni.dev/valid-attachments":[]`, 0)
	n.Stop("datapath")
	verb("DEL", "", 0)

	b, err := os.ReadFile(filepath.Join(n.StateDir, "cni.log"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	want := []struct {
		command, msg string
		phases       []string
		waited       bool
	}{
		{"ADD", "endpoint created", []string{"read", "settle", "namespace", "allocate", "create", "answer"}, true},
		{"ADD", "refused", []string{"read", "settle", "namespace", "allocate", "create", "undo"}, false},
		{"DEL", "endpoint deleted", []string{"read", "delete", "unbind"}, false},
		{"GC", "endpoints reclaimed", []string{"read", "reclaim", "unbind"}, false},
		{"DEL", "deletion spooled, sluice-datapath does not run", []string{"read", "delete", "spool", "unbind"}, false},
	}
	if len(lines) != len(want) {
		t.Fatalf("%d lines, want %d:\n%s", len(lines), len(want), b)
	}
	for i, w := range want {
		var line struct {
			Command     string             `json:"command"`
			Msg         string             `json:"msg"`
			ContainerID string             `json:"container_id"`
			RequestID   string             `json:"request_id"`
			Duration    string             `json:"duration"`
			Phases      map[string]float64 `json:"phases_ms"`
			Waited      float64            `json:"waited_ms"`
			Repeated    int                `json:"repeated"`
		}
		if err := json.Unmarshal([]byte(lines[i]), &line); err != nil {
			t.Fatalf("not one line of JSON: %s", lines[i])
		}
		if line.Command != w.command || line.Msg != w.msg || line.RequestID == "" || w.command != "GC" && line.ContainerID != "c1" {
			t.Errorf("line %s, want %s of %s", lines[i], w.msg, w.command)
		}
		if got := slices.Sorted(maps.Keys(line.Phases)); !slices.Equal(got, slices.Sorted(slices.Values(w.phases))) {
			t.Errorf("%s: phases %v, want %v", lines[i], got, w.phases)
		}
		total, err := time.ParseDuration(line.Duration)
		sum := 0.0
		for _, ms := range line.Phases {
			sum += ms
		}
		if all := float64(total) / 1e6; err != nil || sum < all-0.1 || sum > all+0.1 {
			t.Errorf("%s: the phases are %g ms of %s", lines[i], sum, line.Duration)
		}
		if w.waited != (line.Repeated == 1 && line.Waited >= 20) || !w.waited && line.Repeated != 0 {
			t.Errorf("%s: waited %g ms in %d repetitions", lines[i], line.Waited, line.Repeated)
		}
	}
}

// TestKernelBurstIsServedWithoutRefusal: the datapath runs 4 creations at once and lets 8 wait; it refuses each of the
// others at least once here. The plugin repeats them, so the runtime sees no refusal.
func TestKernelBurstIsServedWithoutRefusal(t *testing.T) {
	const pods, running, places = 110, 4, 12
	n, ns := nodetest.New(t), newNetns(t)
	full := withDetails(codes.ResourceExhausted, "4 calls running, 8 waiting", &errdetails.RetryInfo{RetryDelay: durationpb.New(100 * time.Millisecond)})
	for _, method := range []string{"Allocate", "CreateEndpoint"} {
		var asked atomic.Int32
		all, run, place := make(chan struct{}), make(chan struct{}, running), make(chan struct{}, places)
		n.Fail(method, func(ctx context.Context) error {
			if asked.Add(1) == pods {
				close(all)
			}
			select {
			case place <- struct{}{}:
				defer func() { <-place }()
			default:
				return full(ctx)
			}
			run <- struct{}{}
			defer func() { <-run }()
			<-all // until then nothing moves, so everything behind the 12 has been refused
			return nil
		})
	}
	burst := func(command string) {
		var wg sync.WaitGroup
		for i := range pods {
			wg.Go(func() {
				c := add(n, ns)
				c.command, c.container = command, fmt.Sprint("c", i)
				if out, err := c.process().CombinedOutput(); err != nil {
					t.Errorf("%s of pod %d: %v: %s", command, i, err, out)
				}
			})
		}
		wg.Wait()
	}
	burst("ADD")
	wantHeld(t, n, pods, pods)
	burst("DEL")
	wantHeld(t, n, 0, 0)
}

// limited mounts a tmpfs at dir. The flags and options make it read-only or limit the number of its files or blocks.
func limited(t *testing.T, dir string, flags uintptr, options string) {
	t.Helper()
	requireRoot(t)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chown(dir, int(instance.DatapathID), int(instance.GroupID)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|flags, options); err != nil {
		t.Fatal(err)
	}
}

// TestKernelFullOrReadOnlyDiskIsTriedAgain: an operator must fix a full or read-only disk, so the error asks the
// runtime to try again.
func TestKernelFullOrReadOnlyDiskIsTriedAgain(t *testing.T) {
	sleeper := startSleeper(t)
	for name, c := range map[string]struct {
		flags   uintptr
		options string
	}{
		"full":           {0, "nr_inodes=1,mode=700"},
		"full of blocks": {0, "size=4k,mode=700"},
		"read-only":      {unix.MS_RDONLY, "mode=700"},
	} {
		t.Run(name, func(t *testing.T) {
			n := nodetest.New(t)
			spoolDir := deletion.Dir(n.StateDir)
			limited(t, spoolDir, c.flags, c.options)
			if strings.Contains(c.options, "size") {
				// One page, which is taken.
				if err := os.WriteFile(filepath.Join(spoolDir, ".taken"), make([]byte, 4096), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			n.Stop("datapath")
			del := call{command: "DEL", container: "c1", ifname: "eth0", stdin: config(n, "1.0.0", "")}
			if out := wantCode(t, del, 11); !strings.Contains(out, spoolDir) {
				t.Errorf("DEL does not name the file: %s", out)
			}
			entries, err := os.ReadDir(spoolDir)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				if e.Name() != ".taken" {
					t.Errorf("the spool has %s", e.Name())
				}
			}
			n.Start(t, "datapath")
			wantCode(t, del, 0)

			if strings.Contains(c.options, "size") {
				return // a mount takes no block
			}
			names := filepath.Join(n.RunDir, "netns")
			limited(t, names, c.flags, c.options)
			if out := wantCode(t, add(n, sleeper), 11); !strings.Contains(out, names) {
				t.Errorf("ADD does not name the file: %s", out)
			}
			wantHeld(t, n, 0, 0)
		})
	}
}
