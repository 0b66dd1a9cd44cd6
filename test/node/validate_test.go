// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// moving are the maps that change without a call: pods' own packets are counted, and the collector marks connections.
var moving = []string{
	"sl_metrics", "sl_limits", "sl_rate", "sl_ep_limits", "sl_ct4", "sl_ct6", "sl_ct_stats", "sl_budget", "sl_bound",
	"sl_count", "sl_held", "sl_refused", "sl_frag", "sl_pod_frag", "sl_run", "sl_events", "sl_proxy_beat",
}

// cache is identity's file with the state of etcd and the time of the latest message from etcd. Each message changes
// the file.
const cache = "known.db"

// everything returns the state of a node: its services' files byte by byte, the entries of its maps, its devices and
// its routes.
func (n *testNode) everything(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, service := range []string{devnode.Identity, devnode.IPAM, devnode.Policy, devnode.Datapath, "cni"} {
		err := filepath.WalkDir(n.Paths().ServiceStateDir(service), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || d.Name() == cache {
				return err
			}
			content, err := os.ReadFile(path)
			all[path] = string(content)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range n.datapathStatus(t).GetMaps() {
		if !slices.Contains(moving, m.GetName()) {
			all["map "+m.GetName()] = strings.Join(n.dumpMap(t, m.GetName()), "\n")
		}
	}
	devices, err := nodeDevices(n.Netns())
	if err != nil {
		t.Fatal(err)
	}
	routes, err := nodeRoutes(n.Netns())
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(devices)
	slices.Sort(routes)
	all["devices"], all["routes"] = strings.Join(devices, "\n"), strings.Join(routes, "\n")
	return all
}

// changedIn returns the names of the parts that differ between two states.
func changedIn(before, after map[string]string) (changed []string) {
	for what, content := range before {
		if now, there := after[what]; !there || now != content {
			changed = append(changed, what)
		}
	}
	for what := range after {
		if _, there := before[what]; !there {
			changed = append(changed, what)
		}
	}
	return changed
}

// TestKernelValidateOnlyChangesNothing: with validate_only, every call that changes state reports what it would do,
// and files and kernel stay unchanged, byte by byte.
func TestKernelValidateOnlyChangesNothing(t *testing.T) {
	t.Parallel()
	// No lease expires during the calls, however slow they are.
	n := newNode(t, func(o *devnode.Options) { o.Args = map[string][]string{devnode.IPAM: {"--lease=1h"}} })
	pods := n.addPods(t, "a", "b")
	policies := n.policies(t)
	const manifest = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n" +
		"metadata: {name: web}\nspec: {podSelector: {}}\n"
	enforce(t, policies, manifest)
	ctx := t.Context() // each call has the timeout of its connection
	leased, err := n.ipam.Allocate(ctx, &ipamv1.AllocateRequest{Owner: owner("leased")})
	if err != nil {
		t.Fatal(err)
	}
	var addresses []string
	for _, a := range leased.GetAllocation().GetAddresses() {
		addresses = append(addresses, a.GetAddress())
	}
	reference := &identityv1.ReleaseIdentityRequest_Reference{Reference: "kept"}
	label := []*workloadv1.Label{{Source: "cni", Key: "app", Value: "kept"}}
	kept, err := n.identity.AllocateIdentity(ctx, &identityv1.AllocateIdentityRequest{Labels: label, Reference: "kept"})
	if err != nil {
		t.Fatal(err)
	}
	status, err := policies.GetStatus(ctx, &policyv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	before := n.endpoint(t, pods[0])
	// identity writes its cache after ten seconds, and then removes the changes from its other file.
	servicetest.EventuallyNil(t, "identity has written its cache", func() error {
		content, err := os.ReadFile(filepath.Join(n.Paths().ServiceStateDir(devnode.Identity), cache))
		if err == nil && !bytes.Contains(content, []byte("app=kept")) {
			err = errors.New("without the last label set")
		}
		return err
	})
	// Other effects of the earlier calls are written within a second.
	var want map[string]string
	servicetest.EventuallyNil(t, "nothing changes by itself for three seconds", func() error {
		want = n.everything(t)
		time.Sleep(3 * time.Second) // the sleep shows that no change comes
		if changed := changedIn(want, n.everything(t)); len(changed) > 0 {
			return fmt.Errorf("changed: %q", changed)
		}
		return nil
	})
	other := strings.Replace(manifest, "web", "other", 1)
	web := []*policyv1.PolicyKey{{Kind: "NetworkPolicy", Namespace: "test", Name: "web"}}
	for name, call := range map[string]func() (bool, error){
		"Allocate": func() (bool, error) {
			r, err := n.ipam.Allocate(ctx, &ipamv1.AllocateRequest{Owner: owner("new"), ValidateOnly: true})
			return len(r.GetAllocation().GetAddresses()) == len(addresses), err
		},
		"ConfirmAllocation": func() (bool, error) {
			r, err := n.ipam.ConfirmAllocation(ctx,
				&ipamv1.ConfirmAllocationRequest{Owner: owner("leased"), Addresses: addresses, ValidateOnly: true})
			return r.GetAllocation().GetState() == ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED, err
		},
		"Release of a lease": func() (bool, error) {
			r, err := n.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: owner("leased"), ValidateOnly: true})
			return r.GetReleased().GetState() == ipamv1.AllocationState_ALLOCATION_STATE_LEASED, err
		},
		"Release of a pod": func() (bool, error) {
			r, err := n.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: owner(pods[0].Name), ValidateOnly: true})
			return r.GetReleased().GetState() == ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED, err
		},
		"Release of nothing": func() (bool, error) {
			r, err := n.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: owner("new"), ValidateOnly: true})
			return r.GetReleased() == nil, err
		},
		"AllocateIdentity": func() (bool, error) {
			r, err := n.identity.AllocateIdentity(ctx,
				&identityv1.AllocateIdentityRequest{Labels: label, Reference: "new", ValidateOnly: true})
			return r.GetIdentity().GetNumber() == kept.GetIdentity().GetNumber(), err
		},
		"ResolveEndpoint": func() (bool, error) {
			r, err := n.identity.ResolveEndpoint(ctx,
				&identityv1.ResolveEndpointRequest{Owner: owner(pods[0].Name), Labels: label, ValidateOnly: true})
			return r.GetIdentity().GetNumber() == kept.GetIdentity().GetNumber(), err
		},
		"ReleaseIdentity of a reference": func() (bool, error) {
			r, err := n.identity.ReleaseIdentity(ctx,
				&identityv1.ReleaseIdentityRequest{Holder: reference, ValidateOnly: true})
			return r.GetReleasedNumber() == kept.GetIdentity().GetNumber(), err
		},
		"ReleaseIdentity of a pod": func() (bool, error) {
			holder := &identityv1.ReleaseIdentityRequest_Owner{Owner: owner(pods[0].Name)}
			r, err := n.identity.ReleaseIdentity(ctx,
				&identityv1.ReleaseIdentityRequest{Holder: holder, ValidateOnly: true})
			return r.GetReleasedNumber() == before.GetIdentity(), err
		},
		"CreateEndpoint": func() (bool, error) {
			r, err := n.datapath.CreateEndpoint(ctx, &datapathv1.CreateEndpointRequest{
				Owner: owner("leased"), NetworkNamespace: newPod(t, "c").Netns, Addresses: addresses,
				Labels: label, ValidateOnly: true,
				LeaseExpireTime: leased.GetAllocation().GetLeaseExpireTime(),
			})
			return len(r.GetEndpoint().GetAddresses()) == len(addresses), err
		},
		"DeleteEndpoint": func() (bool, error) {
			r, err := n.datapath.DeleteEndpoint(ctx,
				&datapathv1.DeleteEndpointRequest{Owner: owner(pods[0].Name), ValidateOnly: true})
			return r.GetExisted(), err
		},
		"DeleteEndpoint of nothing": func() (bool, error) {
			r, err := n.datapath.DeleteEndpoint(ctx,
				&datapathv1.DeleteEndpointRequest{Owner: owner("new"), ValidateOnly: true})
			return !r.GetExisted(), err
		},
		"ReclaimEndpoints": func() (bool, error) {
			r, err := n.datapath.ReclaimEndpoints(ctx, &datapathv1.ReclaimEndpointsRequest{
				Manager: before.GetManager(), Network: before.GetNetwork(), NoneValid: true, ValidateOnly: true,
			})
			return len(r.GetReclaimed()) == 2, err
		},
		"AuditMaps": func() (bool, error) {
			stream, err := n.datapath.AuditMaps(ctx, &datapathv1.AuditMapsRequest{})
			if err != nil {
				return false, err
			}
			differences, err := receiveAll(stream)
			return len(differences) == 0, err
		},
		"UpsertPolicies": func() (bool, error) {
			r, err := policies.UpsertPolicies(ctx,
				&policyv1.UpsertPoliciesRequest{Manifests: []byte(other), DefaultNamespace: "test", ValidateOnly: true})
			return r.GetChanges()[0].GetType() == policyv1.ChangeType_CHANGE_TYPE_CREATED, err
		},
		"DeletePolicies": func() (bool, error) {
			r, err := policies.DeletePolicies(ctx, &policyv1.DeletePoliciesRequest{Keys: web, ValidateOnly: true})
			return r.GetChanges()[0].GetType() == policyv1.ChangeType_CHANGE_TYPE_DELETED, err
		},
		"ReplacePolicies": func() (bool, error) {
			r, err := policies.ReplacePolicies(ctx, &policyv1.ReplacePoliciesRequest{
				Manifests: []byte(other), DefaultNamespace: "test", Manager: "m", ValidateOnly: true,
			})
			return r.GetChanges()[0].GetType() == policyv1.ChangeType_CHANGE_TYPE_CREATED, err
		},
		"CompleteSource": func() (bool, error) {
			r, err := policies.CompleteSource(ctx,
				&policyv1.CompleteSourceRequest{Manager: "m", Incarnation: status.GetIncarnation(), ValidateOnly: true})
			return len(r.GetChanges()) == 0, err
		},
		"ConfirmPolicies": func() (bool, error) {
			r, err := policies.ConfirmPolicies(ctx, &policyv1.ConfirmPoliciesRequest{ValidateOnly: true})
			return r.GetPolicies() == 1 && r.GetRevision() == status.GetRevision(), err
		},
		"LearnNames": func() (bool, error) {
			r, err := policies.LearnNames(ctx, &policyv1.LearnNamesRequest{
				Name: "a.example", Addresses: []string{"192.0.2.1"}, Ttl: durationpb.New(patience), ValidateOnly: true,
			})
			return !r.GetUsed(), err
		},
		"ForgetNames": func() (bool, error) {
			r, err := policies.ForgetNames(ctx, &policyv1.ForgetNamesRequest{Pattern: "*", ValidateOnly: true})
			return r.GetNameCount() == 0, err
		},
	} {
		var changed []string
		for range 3 { // services also write by themselves, once a minute
			said, err := call()
			if err != nil || !said {
				t.Errorf("%s: %v, or the answer differs from the answer of the real call", name, err)
			}
			now := n.everything(t)
			if changed = changedIn(want, now); len(changed) == 0 {
				break
			}
			want = now
		}
		if len(changed) > 0 {
			t.Errorf("%s changed %q", name, changed)
		}
	}
	for _, p := range pods {
		n.del(t, p)
	}
	if _, err := n.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: owner("leased")}); err != nil {
		t.Error(err)
	}
	if _, err := n.identity.ReleaseIdentity(ctx, &identityv1.ReleaseIdentityRequest{Holder: reference}); err != nil {
		t.Error(err)
	}
	n.wantNothingHeld(t)
}
