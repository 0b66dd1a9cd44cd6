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
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
	"github.com/sluice-net/sluice/services/cni-shim/internal/unary"
)

// check compares ADD's result with the present state.
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
		case netns.IsProcess(path): // the process number may now belong to another process
			return different([]string{fmt.Sprintf("network namespace: %s is not the one that ADD was given", path)})
		}
	}
	p.phases.begin("check")
	req := &message.CheckEndpointRequest{Owner: p.owner(), NetworkNamespace: path, Addresses: addresses}
	resp, err := ask[message.CheckEndpointResponse](ctx, &p.waits, p.datapath, message.CheckEndpoint, req)
	if unary.CodeOf(err) == unary.NotFound {
		return different([]string{"endpoint: the datapath has no endpoint of " + p.in.Owner.String()})
	}
	if err != nil {
		return cniError("check the endpoint", err)
	}
	var lines []string
	for _, d := range resp.Differences {
		lines = append(lines, describe(d))
	}
	if len(lines) > 0 {
		return different(lines)
	}
	return nil
}

// expected returns the addresses that the runtime expects the container to have.
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
		a := ip.Address.Addr()
		if !a.IsValid() {
			return nil, invocation.Field("prevResult", "ips[%d]: not an address", i)
		}
		addresses = append(addresses, a.String())
	}
	if len(addresses) == 0 {
		return nil, invocation.Field("prevResult", "interface %q has no address", p.in.Owner.Interface)
	}
	return addresses, nil
}

func describe(d *message.Difference) string {
	return fmt.Sprintf("%s %s: want %s, have %s", d.Subject, d.Key, cmp.Or(d.Want, "nothing"), cmp.Or(d.Have, "nothing"))
}

func different(lines []string) *cni.Error {
	return cni.NewError(CodeDifferent, "the attachment differs from ADD's result", strings.Join(lines, "; "))
}

// statusPatience is how long all ADDs may fail before STATUS reports it. The delay is needed because kubelet then makes
// the whole node NotReady. Until then, ADDs wait or are repeated.
const statusPatience = time.Minute

// unableSince returns the time since which no ADD works; zero while ADD works. A file in the run directory stores it
// from one STATUS to the next.
func (p *Plugin) unableSince(unable bool) (time.Time, error) {
	path := filepath.Join(p.in.Config.RunDir, "cni-unable")
	if !unable {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return time.Time{}, err
		}
		return time.Time{}, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o644) // the time of the file is the time of its creation
	if err != nil {
		return time.Time{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return time.Time{}, err
	}
	now := time.Now()
	if since := st.ModTime(); !since.After(now) {
		return since, nil
	}
	return now, os.Chtimes(path, now, now) // the clock was set back after the file was created
}

// status returns nil if an ADD would be served, at least with labels that the node knows. While the datapath is
// unavailable, existing attachments keep working, because its programs stay in the kernel. status does not wait for
// services. It reports a problem that makes every ADD fail only after statusPatience.
func (p *Plugin) status(ctx context.Context) error {
	const what = "the plugin cannot serve ADD"
	var problems []string
	health, err := ask[message.HealthCheckResponse](ctx, &p.waits, p.ipam, message.HealthCheck,
		&message.HealthCheckRequest{Service: message.IPAMService})
	switch {
	case err != nil:
		problems = append(problems, "sluice-ipam: "+explain(err))
	case health.Status != message.HealthCheckResponseServing:
		problems = append(problems, "sluice-ipam: it is not ready")
	}

	code := CodeUnavailable
	st, err := ask[message.GetStatusResponse](ctx, &p.waits, p.datapath, message.GetStatus, &message.GetStatusRequest{})
	switch {
	case err != nil:
		problems = append(problems, "sluice-datapath: "+explain(err))
	case !st.KnownAddReady:
		for _, problem := range st.Service.Problems {
			problems = append(problems, "sluice-datapath: "+problem.Text)
		}
		if len(st.Service.Problems) == 0 {
			problems = append(problems, "sluice-datapath: it is not ready")
		}
		// Endpoints that wait for policies have no traffic, or only traffic with the local node.
		for _, e := range st.Endpoints {
			switch e.State {
			case message.EndpointStateWaitingForIdentity, message.EndpointStateWaitingForPolicy:
				if e.Count > 0 {
					code = CodeLimited
					problems = append(problems, fmt.Sprintf("%d attachments wait for their identity or policy", e.Count))
				}
			}
		}
	}
	since, err := p.unableSince(len(problems) > 0)
	if err != nil {
		p.log.WarnContext(ctx, "cannot determine since when ADDs fail", log.KeyError, err.Error())
	}
	if len(problems) == 0 || err == nil && time.Since(since) < statusPatience {
		return nil
	}
	return cni.NewError(code, what, strings.Join(problems, "; "))
}

// gc deletes every attachment to the network that the runtime does not list. An empty list is intended, because a
// configuration without a list was refused.
func (p *Plugin) gc(ctx context.Context) error {
	req := &message.ReclaimEndpointsRequest{
		Manager: workload.ManagerCNI, Network: p.in.Config.Name, NoneValid: len(p.in.Config.ValidAttachments) == 0,
	}
	keep := make([]string, 0, len(p.in.Config.ValidAttachments))
	for _, o := range p.in.Config.ValidAttachments {
		req.ValidOwners = append(req.ValidOwners, owner(o))
		keep = append(keep, o.String())
	}
	p.phases.begin("reclaim")
	resp, err := ask[message.ReclaimEndpointsResponse](ctx, &p.waits, p.datapath, message.ReclaimEndpoints, req)
	if err != nil {
		return cniError("reclaim endpoints", err)
	}
	p.did("endpoints reclaimed", slog.Int("valid", len(keep)), slog.Int("reclaimed", len(resp.Reclaimed)))
	p.phases.begin("unbind")
	errs := []error{p.names.Prune(keep)}
	for _, o := range resp.Reclaimed {
		errs = append(errs, p.unbind(o.ContainerID+"/"+o.InterfaceName))
	}
	if err := errors.Join(errs...); err != nil {
		return cniError("unbind namespaces", err)
	}
	return nil
}
