// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/fault/faulttest"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// allFaults reports whether every point is tried with every command, several times. Otherwise each point is tried
// once, with the first command that reaches it.
func allFaults() bool { return os.Getenv("SLUICE_TEST_FAULTS") == "all" }

// scenario is a part of a pod's life during which a process is killed.
type scenario struct {
	name string
	// run executes the scenario and returns its result. Its error is handled as a runtime would. Afterwards the pod
	// may be connected or not.
	run func(ctx context.Context, n *testNode, p pod.Pod, config []byte, files []*os.File) ([]byte, error)
	// connectFirst connects the pod before the faults are armed.
	connectFirst bool
	// owes are name parts of the points that the scenario reaches, some of them after the shim has returned.
	owes []string
}

// likely reports whether the scenario should reach a point.
func (s scenario) likely(point string) bool {
	return slices.ContainsFunc(s.owes, func(part string) bool { return strings.Contains(point, "/"+part+"/") })
}

var scenarios = []scenario{
	{
		name: "ADD", owes: []string{"add", "allocate", "confirm", "resolve", "create", "publish"},
		run: func(ctx context.Context, n *testNode, p pod.Pod, config []byte, files []*os.File) ([]byte, error) {
			return n.call(ctx, "ADD", p, config, files...)
		},
	},
	{
		name: "DEL", connectFirst: true, owes: []string{"del", "delete", "release", "publish"},
		run: func(ctx context.Context, n *testNode, p pod.Pod, config []byte, files []*os.File) ([]byte, error) {
			return n.call(ctx, "DEL", p, config, files...)
		},
	},
}

// TestFaultKillEveryServiceAtEveryPoint proves INV-20 to INV-23 and INV-10: each service is killed with SIGKILL at each
// of its fault points in ADD and DEL. Afterwards the test acts as a runtime, with DEL again and GC. No state is leaked,
// no address is allocated twice, and a new pod can be connected. Two other pods exchange data continuously, also while
// the service is down, and lose nothing.
func TestFaultKillEveryServiceAtEveryPoint(t *testing.T) {
	t.Parallel()
	for _, service := range []string{devnode.IPAM, devnode.Identity, devnode.Datapath} {
		t.Run(service, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, shortLease)
			bystanders := n.addPods(t, "bystander", "neighbour")
			others := newWitness(t, bystanders[0], bystanders[1])
			points := n.faultPoints(t, service)
			if len(points) == 0 {
				t.Fatalf("%s has no fault points", service)
			}
			points = slices.DeleteFunc(points, background)
			reached := make(map[string]bool)
			for _, point := range points {
				for _, s := range scenarios {
					if !allFaults() && (reached[point] || !s.likely(point)) {
						continue
					}
					ok := t.Run(strings.ReplaceAll(point, "/", ".")+"/"+s.name, func(t *testing.T) {
						if n.killServiceAt(t, service, point, s, bystanders, others) {
							reached[point] = true
						}
					})
					if !ok {
						t.FailNow()
					}
				}
			}
			for _, point := range points {
				if !reached[point] {
					t.Errorf("fault point %s is in neither ADD nor DEL", point)
				}
			}
			others.stop(t)
			for _, p := range bystanders {
				n.del(t, p)
			}
			n.wantNothingHeld(t)
		})
	}
}

// shortLease shortens leases, so that a killed ADD's lease, which is neither confirmed nor released, expires during a
// test.
func shortLease(o *devnode.Options) {
	o.Args = map[string][]string{devnode.IPAM: {"--lease=4s"}}
}

// background reports whether a point belongs to work that neither ADD nor DEL triggers at once. The tests of the
// service cover such points.
func background(point string) bool {
	parts := strings.Split(point, "/")
	return applying(point) || relabelling(point) || auditing(point) || slices.ContainsFunc(parts, func(part string) bool {
		return slices.Contains([]string{"expire", "ranges", "claim", "return", "register"}, part)
	})
}

// TestFaultKillShimAtEveryPoint kills the shim, as a runtime does after a timeout.
func TestFaultKillShimAtEveryPoint(t *testing.T) {
	t.Parallel()
	n := newNode(t, shortLease)
	bystanders := n.addPods(t, "bystander", "neighbour")
	others := newWitness(t, bystanders[0], bystanders[1])
	points := n.shimFaultPoints(t)
	reached := make(map[string]bool)
	for _, point := range points {
		for _, s := range scenarios {
			if !allFaults() && (reached[point] || !s.likely(point)) {
				continue
			}
			ok := t.Run(strings.ReplaceAll(point, "/", ".")+"/"+s.name, func(t *testing.T) {
				controller, files := newController(t)
				controller.KillAt(point, 0)
				n.during(t, s, bystanders, files, func() {
					controller.Started()
					others.progress(t, "after "+point)
				})
				reached[point] = reached[point] || controller.Hits(point) > 0
			})
			if !ok {
				t.FailNow()
			}
		}
	}
	for _, point := range points {
		if !reached[point] {
			// The shim spools a DEL only while the datapath is down.
			ok := t.Run(strings.ReplaceAll(point, "/", ".")+"/DEL without datapath", func(t *testing.T) {
				controller, files := newController(t)
				controller.KillAt(point, 0)
				p := newPod(t, "fault")
				config := n.config(t, "1.0.0", labels("app", "fault"))
				p = n.add(t, p, config)
				if err := n.Kill(t.Context(), devnode.Datapath); err != nil {
					t.Fatal(err)
				}
				_, _ = n.call(t.Context(), "DEL", p, config, files...)
				controller.Started()
				if controller.Hits(point) == 0 {
					t.Errorf("fault point %s is in neither ADD nor DEL", point)
				}
				// Retry as a runtime does, while the datapath is still down.
				if _, err := n.call(t.Context(), "DEL", p, config); err != nil {
					t.Errorf("DEL without datapath: %v", err)
				}
				others.progress(t, "without datapath")
				if err := n.Start(t.Context(), devnode.Datapath); err != nil {
					t.Fatal(err)
				}
				n.wantOnly(t, bystanders)
			})
			if !ok {
				t.FailNow()
			}
		}
	}
	others.stop(t)
	for _, p := range bystanders {
		n.del(t, p)
	}
	n.wantNothingHeld(t)
}

// killServiceAt runs a scenario with a service that is killed at a point, and reports whether it was.
func (n *testNode) killServiceAt(t *testing.T, service, point string, s scenario, bystanders []pod.Pod, others *witness,
) bool {
	t.Helper()
	var controller *faulttest.Controller
	arm := func() {
		if err := n.Kill(t.Context(), service); err != nil {
			t.Fatal(err)
		}
		var files []*os.File
		controller, files = newController(t)
		if err := n.Start(t.Context(), service, files...); err != nil {
			t.Fatal(err)
		}
		controller.Started()
		controller.KillAt(point, 0)
	}
	hit := false
	restart := func() {
		if s.likely(point) {
			// Some work of a DEL is done after its answer.
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			if err := controller.WaitHits(ctx, point, 1); err != nil {
				t.Errorf("%s: %v", s.name, err)
			}
			cancel()
		}
		hit = controller.Hits(point) > 0
		if err := n.Kill(t.Context(), service); err != nil {
			t.Fatal(err)
		}
		others.progress(t, "while "+service+" is dead after "+point)
		if err := n.Start(t.Context(), service); err != nil {
			t.Fatal(err)
		}
	}
	hits := func(ctx context.Context) error { return controller.WaitHits(ctx, point, 1) }
	n.duringWith(t, s, bystanders, nil, arm, hits, restart)
	return hit
}

func (n *testNode) during(t *testing.T, s scenario, bystanders []pod.Pod, files []*os.File, started func()) {
	t.Helper()
	// The call ends when the shim ends.
	never := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	n.duringWith(t, s, bystanders, files, func() {}, never, started)
}

// duringWith runs a scenario between arm and recovered, then handles a failure as a runtime does and checks the
// result. Died returns nil when the awaited process has died.
func (n *testNode) duringWith(t *testing.T, s scenario, bystanders []pod.Pod, files []*os.File, arm func(),
	died func(context.Context) error, recovered func(),
) {
	t.Helper()
	p := newPod(t, "fault")
	config := n.config(t, "1.0.0", labels("app", "fault", "pod", p.Name))
	if s.connectFirst {
		p = n.add(t, p, config)
	}
	arm()
	// The call has until the process dies, and a little longer to handle that.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	var wg sync.WaitGroup
	wg.Go(func() {
		if died(ctx) == nil {
			defer time.AfterFunc(2*time.Second, cancel).Stop()
			<-ctx.Done()
		}
	})
	result, err := s.run(ctx, n, p, config, files)
	cancel()
	wg.Wait()
	recovered()

	if s.name == "ADD" && err == nil {
		// The ADD succeeded despite the kill, so the pod must work.
		p = withAddresses(t, p, result)
		exchange(t, p, bystanders[0])
	}
	// Runtimes call DEL after a failed ADD, and repeat a failed DEL.
	if _, err := n.call(t.Context(), "DEL", p, config); err != nil {
		t.Fatalf("DEL after the fault: %v", err)
	}
	n.reclaim(t, bystanders)
	n.wantOnly(t, bystanders)

	// A new pod gets an unused address, and works.
	fresh := n.add(t, newPod(t, "fresh"), n.config(t, "1.0.0", labels("app", "fresh")))
	for _, other := range bystanders {
		for _, a := range fresh.Addresses() {
			if slices.Contains(other.Addresses(), a) {
				t.Fatalf("address %s was given to %s while %s holds it", a, fresh.Name, other.Name)
			}
		}
	}
	exchange(t, fresh, bystanders[0])
	n.del(t, fresh)
	n.wantOnly(t, bystanders)
}

// reclaim calls CNI GC with these pods as the valid ones.
func (n *testNode) reclaim(t *testing.T, valid []pod.Pod) {
	t.Helper()
	var owners []*workloadv1.Owner
	for _, p := range valid {
		owners = append(owners, owner(p.Name))
	}
	if _, err := n.datapath.ReclaimEndpoints(t.Context(), &datapathv1.ReclaimEndpointsRequest{
		Manager: "cni", Network: "sluice", ValidOwners: owners, NoneValid: len(owners) == 0,
	}); err != nil {
		t.Fatalf("GC: %v", err)
	}
}

// wantOnly waits until the services hold state for these pods only. DEL releases the leases of failed ADDs.
func (n *testNode) wantOnly(t *testing.T, pods []pod.Pod) {
	t.Helper()
	servicetest.EventuallyNil(t, "only the bystanders have state", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		held, err := n.holdings(ctx)
		if err != nil {
			return err
		}
		var foreign []string
		endpoints := 0
		for _, h := range held {
			switch {
			case strings.HasPrefix(h, "record "), strings.HasPrefix(h, "identity "):
				// These are counted below.
			case slices.ContainsFunc(pods,
				func(p pod.Pod) bool { return strings.HasSuffix(h, " of "+p.Name) || h == "endpoint "+p.Name }):
				endpoints++
			default:
				foreign = append(foreign, h)
			}
		}
		// For each pod one endpoint and two addresses, and one identity and one record.
		if endpoints != 3*len(pods) {
			foreign = append(foreign, fmt.Sprintf("%d endpoints and addresses of the bystanders, want %d", endpoints,
				3*len(pods)))
		}
		for _, kind := range []string{"identity ", "record "} {
			if got := countPrefix(held, kind); got != len(pods) {
				foreign = append(foreign, fmt.Sprintf("%d of kind %q, want %d: %v", got, kind, len(pods), held))
			}
		}
		devices, err := nodeDevices(n.Netns())
		if err != nil {
			return err
		}
		if len(devices) != len(pods) {
			foreign = append(foreign, fmt.Sprintf("devices %v, want %d", devices, len(pods)))
		}
		if len(foreign) > 0 {
			return errors.New(strings.Join(foreign, "; "))
		}
		return nil
	})
}

func countPrefix(all []string, prefix string) int {
	n := 0
	for _, s := range all {
		if strings.HasPrefix(s, prefix) {
			n++
		}
	}
	return n
}

// newController returns a controller and the files that the process inherits.
func newController(t *testing.T) (*faulttest.Controller, []*os.File) {
	t.Helper()
	var carrier exec.Cmd
	controller := faulttest.New(t, &carrier)
	return controller, carrier.ExtraFiles
}

// faultPoints returns the fault points of a running service.
func (n *testNode) faultPoints(t *testing.T, service string) []string {
	t.Helper()
	if err := n.Kill(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	controller, files := newController(t)
	if err := n.Start(t.Context(), service, files...); err != nil {
		t.Fatal(err)
	}
	controller.Started()
	names, err := controller.Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Kill(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	if err := n.Start(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	return names
}

func (n *testNode) shimFaultPoints(t *testing.T) []string {
	t.Helper()
	controller, files := newController(t)
	if _, err := cni.Run(t.Context(), cni.Call{
		Plugin: n.Plugin(), Command: "VERSION",
		Config: []byte(`{"cniVersion":"1.0.0"}`), ExtraFiles: files,
	}); err != nil {
		t.Fatal(err)
	}
	controller.Started()
	names, err := controller.Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return names
}
