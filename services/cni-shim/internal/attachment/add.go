// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
	"github.com/sluice-net/sluice/services/cni-shim/internal/unary"
)

// add connects the container. If a step fails, it undoes the earlier steps in reverse order.
func (p *Plugin) add(ctx context.Context, stdout io.Writer) (err error) {
	var undo []func()
	defer func() {
		if err != nil && len(undo) > 0 {
			p.phases.begin("undo")
			for _, u := range slices.Backward(undo) {
				u()
			}
		}
	}()
	if err := faultAddBegin.Hit(ctx); err != nil {
		return cniError("ADD", err)
	}

	if err := p.notAttached(); err != nil {
		return err
	}
	if err := p.notShaped(); err != nil {
		return err
	}
	p.phases.begin("settle")
	if err := p.finishDeletion(ctx); err != nil {
		return cniError("delete the earlier endpoint", err)
	}
	p.phases.begin("namespace")
	path, unbind, err := p.namespace()
	if err != nil {
		return cniError("network namespace", err)
	}
	undo = append(undo, func() { p.undo(ctx, "unbind the namespace", func(context.Context) error { return unbind() }) })
	if err := faultAddBound.Hit(ctx); err != nil {
		return cniError("ADD", err)
	}

	p.phases.begin("allocate")
	lease, err := p.allocate(ctx)
	if err != nil {
		// If the answer was lost, at most a lease exists, and it expires.
		return cniError("allocate addresses", err)
	}
	// A confirmed allocation belongs to an endpoint that an earlier ADD has created. This ADD may use it, but
	// undoes only its own steps.
	ours := lease.State != message.AllocationStateConfirmed
	var earlier *message.Endpoint
	if !ours {
		if earlier, err = p.endpoint(ctx); err != nil {
			return cniError("look for an earlier endpoint", err)
		}
	} else {
		undo = append(undo, func() { p.undo(ctx, "release the addresses", p.release) })
	}
	if err := faultAddAllocated.Hit(ctx); err != nil {
		return cniError("ADD", err)
	}

	p.phases.begin("create")
	endpoint, open, err := p.create(ctx, path, lease, ours)
	if err != nil {
		if ours && open {
			// The endpoint may exist, and its addresses may be in use.
			undo[len(undo)-1] = func() { p.undo(ctx, "delete the endpoint", p.deleteAndRelease) }
		}
		if unary.CodeOf(err) == unary.AlreadyExists {
			return p.attached()
		}
		return cniError("create the endpoint", err)
	}
	switch {
	case earlier != nil && sameAttachment(earlier, endpoint):
		return p.attached()
	case !ours: // the container of the earlier ADD has ended without a DEL
		undo = append(undo, func() { p.undo(ctx, "delete the endpoint", p.deleteAndRelease) })
	default:
		undo[len(undo)-1] = func() { p.undo(ctx, "delete the endpoint", p.deleteAndRelease) }
	}
	if err := faultAddCreated.Hit(ctx); err != nil {
		return cniError("ADD", err)
	}

	p.phases.begin("answer")
	result, err := p.result(endpoint)
	if err != nil {
		return cniError("answer of sluice-datapath", err)
	}
	if err := result.Print(stdout, p.in.Config.CNIVersion); err != nil {
		return cni.NewError(cni.ErrIOFailure, "write the result: "+err.Error(), "")
	}
	p.did("endpoint created", slog.Uint64("identity", uint64(endpoint.Identity)),
		slog.String("device", endpoint.HostInterface.Name), slog.Any("addresses", endpoint.Addresses))
	return nil
}

// loopback is the device that every network namespace has. A chain may configure it before sluice-cni, as Nomad's
// chains do, because it has no routes that could conflict.
const loopback = "lo"

// notAttached refuses a chain in which another plugin has already created an interface in the container, because the
// routes of two interfaces would conflict.
func (p *Plugin) notAttached() error {
	prev := p.in.Config.PrevResult
	if prev == nil {
		return nil
	}
	for i, dev := range prev.Interfaces {
		if dev.Sandbox == "" || dev.Name == loopback {
			continue
		}
		if filepath.Clean(dev.Sandbox) == filepath.Clean(p.in.Netns) || netns.Same(dev.Sandbox, p.in.Netns) {
			return invocation.Field("prevResult", "interfaces[%d]: the container has interface %q already; sluice-cni must be the plugin that connects it", i, dev.Name)
		}
	}
	return nil
}

func (p *Plugin) allocate(ctx context.Context) (*message.Allocation, error) {
	req := &message.AllocateRequest{Owner: p.owner(), Namespace: p.in.Pod.Namespace}
	for _, a := range p.in.Config.Addresses {
		req.RequestedAddresses = append(req.RequestedAddresses, a.String())
	}
	resp, err := ask[message.AllocateResponse](ctx, &p.waits, p.ipam, message.Allocate, req)
	if err != nil {
		return nil, err
	}
	if resp.Allocation == nil || len(resp.Allocation.Addresses) == 0 {
		return nil, errors.New("sluice-ipam answered without an address")
	}
	return resp.Allocation, nil
}

// create creates the endpoint. It also reports whether the outcome is unknown, because the answer to a request was lost
// that may have reached the datapath; the answer to a later request does not change that. ours means that this ADD has
// created the lease.
func (p *Plugin) create(ctx context.Context, path string, lease *message.Allocation, ours bool) (_ *message.Endpoint, open bool, _ error) {
	req := &message.CreateEndpointRequest{
		Owner:            p.owner(),
		Manager:          workload.ManagerCNI,
		Network:          p.in.Config.Name,
		NetworkNamespace: path,
		MAC:              p.in.Config.MAC,
		MTU:              p.in.Config.MTU,
	}
	if pod := p.in.Pod; pod.Name != "" {
		req.Pod = &message.PodReference{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	}
	for _, l := range p.in.Labels {
		req.Labels = append(req.Labels, &message.Label{Source: l.Source, Key: l.Key, Value: l.Value})
	}
	for _, m := range p.in.Config.PortMappings {
		mapping := &message.PortMapping{
			HostPort: uint32(m.HostPort), ContainerPort: uint32(m.ContainerPort), Protocol: message.Protocol(m.Protocol),
		}
		if m.HostIP.IsValid() {
			mapping.HostIP = m.HostIP.String()
		}
		req.PortMappings = append(req.PortMappings, mapping)
	}
	renew := useLease(req, lease)
	var undone error // why the datapath has undone the creation
	ask := func(ctx context.Context) (*message.CreateEndpointResponse, error) {
		if !renew.IsZero() && !time.Now().Before(renew) {
			lease, err := p.allocate(ctx)
			if err != nil {
				return nil, err
			}
			renew = useLease(req, lease)
		}
		resp, err := request[message.CreateEndpointResponse](ctx, p.datapath, message.CreateEndpoint, req)
		open = open || err != nil && !unsent(err) && !answered(err)
		if _, ok := retryDelay(err); ok {
			undone = err
		}
		return resp, err
	}
	exchange := func(ctx context.Context) (*message.CreateEndpointResponse, error) {
		for {
			resp, err := ask(ctx)
			// An ipam that was restarted or has lost its state may lease addresses of existing endpoints.
			// Retry with other addresses; addresses that an operator has requested are not replaced. If an
			// endpoint of this ADD may have the addresses, delete it first.
			if !ours || len(p.in.Config.Addresses) > 0 || !addressInUse(err) {
				return resp, err
			}
			refused, giveBack := req.Addresses, p.release
			if open {
				giveBack = p.deleteAndRelease
			}
			if rerr := giveBack(ctx); rerr != nil {
				return nil, err
			}
			open = false
			lease, lerr := p.allocate(ctx)
			if lerr != nil {
				return nil, lerr
			}
			renew = useLease(req, lease)
			if slices.Equal(refused, req.Addresses) {
				return nil, err // ipam leased the same addresses, so another request now would fail too
			}
		}
	}
	var cause error // why addresses had to be leased again
	for lost := 1; ; lost++ {
		resp, err := call(ctx, &p.waits, p.datapath.Path(), exchange)
		if err == nil {
			return resp.Endpoint, false, nil
		}
		if cause != nil && timeIsUp(ctx, err) {
			return nil, open, cause
		}
		if !leaseLost(err) {
			return nil, open, err
		}
		// If the datapath has undone the creation because a service was unavailable, it has also released the
		// lease. Report the unavailable service to the operator.
		if cause = undone; cause == nil {
			cause = err
		}
		if wait, ok := pause(ctx, leasePause, lost); !ok || !p.waits.sleep(ctx, wait) {
			return nil, open, cause
		}
		renew = time.Now()
	}
}

// unsent reports whether the server has certainly not begun to execute a call.
func unsent(err error) bool {
	e, ok := errors.AsType[*unary.Error](err)
	return ok && e.Unsent
}

// leasePause is the pause before ADD leases addresses again.
const leasePause = 50 * time.Millisecond

// endpoint returns the datapath's endpoint of the owner; nil if it has none.
func (p *Plugin) endpoint(ctx context.Context) (*message.Endpoint, error) {
	req := &message.GetEndpointRequest{Owner: p.owner()}
	resp, err := ask[message.GetEndpointResponse](ctx, &p.waits, p.datapath, message.GetEndpoint, req)
	if unary.CodeOf(err) == unary.NotFound {
		return nil, nil //nolint:nilnil // a missing endpoint is not an error
	}
	return resp.Endpoint, err
}

// attached refuses a second ADD: CNI requires an error if the interface exists in the container. This includes an ADD
// whose answer was lost; the runtime regards it as failed, and calls DEL before the next ADD.
func (p *Plugin) attached() error {
	return invocation.Environment(invocation.EnvIfName, fmt.Errorf(
		"the container has %s from an earlier ADD; call DEL before another ADD", p.in.Owner.Interface))
}

// sameAttachment reports whether an endpoint is the same as before. The datapath creates a new one if the device was
// removed with its namespace.
func sameAttachment(before, now *message.Endpoint) bool {
	return now != nil && before.HostInterface.Index == now.HostInterface.Index &&
		before.CreateTime.Time().Equal(now.CreateTime.Time())
}

// useLease adds the leased addresses to the request, and returns the time at which the lease should be renewed; zero if
// it does not expire.
func useLease(req *message.CreateEndpointRequest, lease *message.Allocation) (renew time.Time) {
	req.LeaseExpireTime, req.Addresses = lease.LeaseExpireTime, nil
	for _, a := range lease.Addresses {
		req.Addresses = append(req.Addresses, a.Address)
	}
	if lease.LeaseExpireTime == nil {
		return time.Time{}
	}
	return time.Now().Add(time.Until(lease.LeaseExpireTime.Time()) / 2)
}

func (p *Plugin) release(ctx context.Context) error {
	_, err := ask[message.ReleaseResponse](ctx, &p.waits, p.ipam, message.Release, &message.ReleaseRequest{Owner: p.owner()})
	return err
}

// deleteAndRelease first makes sure that the datapath has no endpoint with the addresses. If this is not certain, it
// does not release them, because another endpoint would get them. The lease then expires, or is released with the
// tombstone.
func (p *Plugin) deleteAndRelease(ctx context.Context) error {
	req := &message.DeleteEndpointRequest{Owner: p.owner()}
	resp, err := ask[message.DeleteEndpointResponse](ctx, &p.waits, p.datapath, message.DeleteEndpoint, req)
	if err != nil {
		return err
	}
	if resp.Existed {
		return nil // the datapath releases the addresses with the tombstone
	}
	return p.release(ctx)
}
