// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
)

// check compares what ADD answered with what is there now.
func (p *Plugin) check(ctx context.Context) error {
	addresses, err := p.expected()
	if err != nil {
		return err
	}
	if _, err := netns.Check(p.in.Netns); err != nil {
		return cniError("network namespace", invocation.Environment(invocation.EnvNetns, err))
	}
	path := p.in.Netns
	if netns.NeedsName(path) {
		bound, earlier := p.names.Path(p.in.Owner.String()), p.names.EarlierPath(p.in.Owner.String())
		switch {
		case netns.Same(path, bound):
			path = bound
		case netns.Same(path, earlier):
			path = earlier
		case netns.IsProcess(path): // which may be another process by now
			return different([]string{fmt.Sprintf("network namespace: %s is not the one that ADD was given", path)})
		}
	}
	p.phases.begin("check")
	request := &datapathv1.CheckEndpointRequest{Owner: p.owner(), NetworkNamespace: path, Addresses: addresses}
	resp, err := ask(ctx, &p.waits, p.datapathSocket, p.datapath.CheckEndpoint, request)
	if status.Code(err) == codes.NotFound {
		return different([]string{"endpoint: there is none of " + p.in.Owner.String()})
	}
	if err != nil {
		return cniError("check the endpoint", err)
	}
	var lines []string
	for _, d := range resp.GetDifferences() {
		lines = append(lines, describe(d))
	}
	if len(lines) > 0 {
		return different(lines)
	}
	return nil
}

// expected gives the addresses that the runtime thinks the container has.
func (p *Plugin) expected() ([]string, error) {
	prev := p.in.Config.PrevResult
	index := -1
	for i, dev := range prev.Interfaces {
		if dev.Name == p.in.Owner.Interface && filepath.Clean(dev.Sandbox) == filepath.Clean(p.in.Netns) {
			index = i
		}
	}
	if index < 0 {
		return nil, invocation.Field("prevResult", "it has no interface %q in %s", p.in.Owner.Interface, p.in.Netns)
	}
	var addresses []string
	for i, ip := range prev.IPs {
		if ip.Interface == nil || *ip.Interface != index {
			continue
		}
		a, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return nil, invocation.Field("prevResult", "ips[%d]: not an address", i)
		}
		addresses = append(addresses, wire.Address(a.Unmap()))
	}
	if len(addresses) == 0 {
		return nil, invocation.Field("prevResult", "interface %q has no address", p.in.Owner.Interface)
	}
	return addresses, nil
}

func describe(d *datapathv1.Difference) string {
	return fmt.Sprintf("%s %s: want %s, have %s", d.GetSubject(), d.GetKey(), cmp.Or(d.GetWant(), "nothing"),
		cmp.Or(d.GetHave(), "nothing"))
}

func different(lines []string) *types.Error {
	return types.NewError(CodeDifferent, "the attachment is not what ADD made", strings.Join(lines, "; "))
}

// statusPatience is how long no ADD at all may work before STATUS says so: kubelet
// makes the whole node NotReady then. Until then ADDs wait, or are repeated.
const statusPatience = time.Minute

// unableSince is since when no ADD works, as a file in the run directory remembers
// from one STATUS to the next; zero while one works.
func (p *Plugin) unableSince(unable bool) (time.Time, error) {
	path := filepath.Join(p.in.Config.RunDir, "cni-unable")
	if !unable {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return time.Time{}, err
		}
		return time.Time{}, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o644) // the first one gives it its time
	if err != nil {
		return time.Time{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return time.Time{}, err
	}
	return st.ModTime(), nil
}

// status says whether an ADD would be served, if only one with labels that the node
// knows. While the datapath is away the existing attachments do not suffer: its
// programs stay in the kernel. Nobody is waited for, but what keeps every ADD from
// working counts only after statusPatience.
func (p *Plugin) status(ctx context.Context) error {
	const what = "the plugin cannot serve ADD"
	var problems []string
	health, err := ask(ctx, &p.waits, p.ipamSocket, grpc_health_v1.NewHealthClient(p.ipamConn).Check,
		&grpc_health_v1.HealthCheckRequest{Service: ipamv1.IPAMService_ServiceDesc.ServiceName})
	switch {
	case err != nil:
		problems = append(problems, "sluice-ipam: "+message(err))
	case health.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING:
		problems = append(problems, "sluice-ipam: it is not ready")
	}

	code := CodeUnavailable
	st, err := ask(ctx, &p.waits, p.datapathSocket, p.datapath.GetStatus, &datapathv1.GetStatusRequest{})
	switch {
	case err != nil:
		problems = append(problems, "sluice-datapath: "+message(err))
	case !st.GetKnownAddReady():
		for _, problem := range st.GetService().GetProblems() {
			problems = append(problems, "sluice-datapath: "+problem.GetText())
		}
		if len(st.GetService().GetProblems()) == 0 {
			problems = append(problems, "sluice-datapath: it is not ready")
		}
		// Endpoints that wait have no traffic, or that of their local node only.
		for _, e := range st.GetEndpoints() {
			switch e.GetState() {
			case datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_IDENTITY, datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_POLICY:
				if e.GetCount() > 0 {
					code = CodeLimited
					problems = append(problems, fmt.Sprintf("%d attachments wait for their identity or policy", e.GetCount()))
				}
			}
		}
	}
	since, err := p.unableSince(len(problems) > 0)
	if err != nil {
		p.log.WarnContext(ctx, "it is not known since when no ADD works", log.KeyError, err.Error())
	}
	if len(problems) == 0 || err == nil && time.Since(since) < statusPatience {
		return nil
	}
	return types.NewError(code, what, strings.Join(problems, "; "))
}

// gc deletes every attachment to the network that the runtime does not list. An
// empty list is meant: without one the configuration was refused.
func (p *Plugin) gc(ctx context.Context) error {
	req := &datapathv1.ReclaimEndpointsRequest{Manager: workload.ManagerCNI, Network: p.in.Config.Name, NoneValid: len(p.in.Config.ValidAttachments) == 0}
	keep := make([]string, 0, len(p.in.Config.ValidAttachments))
	for _, o := range p.in.Config.ValidAttachments {
		req.ValidOwners = append(req.ValidOwners, wire.Owner(o))
		keep = append(keep, o.String())
	}
	p.phases.begin("reclaim")
	resp, err := ask(ctx, &p.waits, p.datapathSocket, p.datapath.ReclaimEndpoints, req)
	if err != nil {
		return cniError("reclaim endpoints", err)
	}
	p.did("endpoints reclaimed", slog.Int("valid", len(keep)), slog.Int("reclaimed", len(resp.GetReclaimed())))
	p.phases.begin("unbind")
	errs := []error{p.names.Prune(keep)}
	for _, o := range resp.GetReclaimed() {
		errs = append(errs, p.unbind(o.GetContainerId()+"/"+o.GetInterfaceName()))
	}
	if err := errors.Join(errs...); err != nil {
		return cniError("unbind namespaces", err)
	}
	return nil
}
