// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package status

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// loadBalancerStatus is what the load balancer says of itself.
type loadBalancerStatus struct {
	Revision         uint64              `json:"revision"`
	Services         uint32              `json:"services"`
	EndpointSlices   uint32              `json:"endpointSlices"`
	OrphanedSlices   uint32              `json:"orphanedSlices"` // whose service is missing
	Frontends        uint32              `json:"frontends"`
	Backends         uint32              `json:"backends"`
	Refused          uint32              `json:"refused"`
	HealthCheckPorts uint32              `json:"healthCheckPorts"`
	Sources          []serviceSource     `json:"sources"`
	Subscribers      []serviceSubscriber `json:"subscribers"`
	Limits           []sharedLimit       `json:"limits,omitempty"`
	// SystemRefused says why frontends of the cluster's own services are not in force.
	SystemRefused string `json:"systemRefused,omitempty"`

	problems []string // as the service words them
}

// sharedLimit is a limit that tenants share.
type sharedLimit struct {
	Name      string `json:"name"`
	Size      uint32 `json:"size"`
	Used      uint32 `json:"used"`
	Asked     uint32 `json:"asked"`
	Exceeding uint32 `json:"exceedingTenants"`
}

type serviceSource struct {
	Name    string `json:"name"`
	Manager string `json:"manager,omitempty"`
	Synced  bool   `json:"synced"`
	Error   string `json:"error,omitempty"`
	Objects uint32 `json:"objects"`
}

type serviceSubscriber struct {
	Name      string   `json:"name"`
	Connected bool     `json:"connected"`
	Enforces  bool     `json:"enforces"` // else it only watches
	Revision  uint64   `json:"revision"`
	Ended     uint64   `json:"endedRevision"`
	Refusals  []string `json:"refusals,omitempty"`
}

func loadBalancerOf(r *lbv1.GetStatusResponse) *loadBalancerStatus {
	s := &loadBalancerStatus{
		Revision: r.GetRevision(), Services: r.GetServices(), EndpointSlices: r.GetEndpointSlices(),
		OrphanedSlices: r.GetOrphanedSlices(), Frontends: r.GetFrontends(), Backends: r.GetBackends(),
		Refused: r.GetRefused(), HealthCheckPorts: r.GetHealthCheckPorts(),
		Sources: []serviceSource{}, Subscribers: []serviceSubscriber{}, problems: textsOf(r.GetService()),
	}
	if n := r.GetService().GetOmittedProblemCount(); n > 0 {
		s.problems = append(s.problems, fmt.Sprintf("%d more problems are left out", n))
	}
	for _, x := range r.GetSources() {
		s.Sources = append(s.Sources, serviceSource{x.GetName(), x.GetManager(), x.GetSynced(), x.GetError(), x.GetObjects()})
	}
	s.SystemRefused = r.GetSystemRefused()
	for _, x := range r.GetLimits() {
		s.Limits = append(s.Limits, sharedLimit{
			x.GetName(), x.GetSize(), x.GetUsed(), x.GetAsked(), x.GetExceedingTenants(),
		})
	}
	for _, x := range r.GetSubscribers() {
		s.Subscribers = append(s.Subscribers, serviceSubscriber{
			x.GetName(), x.GetConnected(), x.GetEnforces(), x.GetRevision(), x.GetEndedRevision(), x.GetRefusals(),
		})
	}
	return s
}

// rows are the services, where they lead, and where they come from; off says that the
// datapath is set to translate none.
func (s *loadBalancerStatus) rows(w io.Writer, off bool) {
	text := fmt.Sprintf("%d with %d endpoint slices, revision %d", s.Services, s.EndpointSlices, s.Revision)
	if s.OrphanedSlices > 0 {
		text += fmt.Sprintf("; %d slices wait for their service", s.OrphanedSlices)
	}
	output.Row(w, "Services", text)
	text = fmt.Sprintf("%d to %d backends", s.Frontends, s.Backends)
	for _, x := range s.Subscribers {
		if x.Enforces {
			text += fmt.Sprintf("; %s enforces revision %d", x.Name, x.Revision)
			if !x.Connected {
				text += " and is not connected"
			}
		}
	}
	enforces := func(x serviceSubscriber) bool { return x.Enforces }
	if off && !slices.ContainsFunc(s.Subscribers, enforces) {
		text += "; the datapath translates none (loadBalancing.mode is off)"
	}
	output.Row(w, "Frontends", text)
	var sources []string
	for _, x := range s.Sources {
		name := strings.TrimSuffix(x.Name+" "+x.Manager, " ")
		if !x.Synced {
			name += " (not complete yet)"
		}
		sources = append(sources, name)
	}
	output.Row(w, "Service sources", strings.Join(sources, ", "))
}

// warnings is what is wrong with services; off says that the datapath is set to
// translate none.
func (s *loadBalancerStatus) warnings(off bool) (all []string) {
	for _, problem := range s.problems {
		all = append(all, "sluice-loadbalancer: "+problem)
	}
	if s.Refused > 0 && len(s.problems) == 0 {
		all = append(all,
			fmt.Sprintf("sluice-loadbalancer: %d objects or files were refused; see `sluice service list`", s.Refused))
	}
	for _, x := range s.Sources {
		if !x.Synced && x.Error == "" { // an error is one of the problems
			name := strings.TrimSuffix(x.Name+" "+x.Manager, " ")
			all = append(all, "sluice-loadbalancer: source "+name+" is not complete yet")
		}
	}
	for _, x := range s.Subscribers {
		if x.Enforces && !x.Connected {
			all = append(all,
				fmt.Sprintf("sluice-loadbalancer: %s is not connected: the kernel keeps the services of revision %d",
					x.Name, x.Revision))
		}
	}
	enforces := func(x serviceSubscriber) bool { return x.Enforces }
	if s.Frontends > 0 && !off && !slices.ContainsFunc(s.Subscribers, enforces) {
		all = append(all, "sluice-loadbalancer: no datapath takes the services")
	}
	return all
}

// frontendStream is how far the frontends of the load balancer are in the kernel.
type frontendStream struct {
	Complete  bool     `json:"complete"` // all were enforced at least once
	Error     string   `json:"error,omitempty"`
	Revision  uint64   `json:"revision"`
	Ended     uint64   `json:"endedRevision"`
	Frontends uint32   `json:"frontends"`
	Backends  uint32   `json:"backends"`
	Resting   uint32   `json:"restingNumbers"`
	Earlier   uint32   `json:"earlierFrontends"`
	Refused   []string `json:"refused,omitempty"`
	Refusals  uint32   `json:"refusedCount"`
}

// frontendsOf is nil for a datapath that translates no service.
func frontendsOf(m *datapathv1.FrontendStream) *frontendStream {
	if m == nil {
		return nil
	}
	return &frontendStream{
		Complete: m.GetComplete(), Error: m.GetError(), Revision: m.GetRevision(), Ended: m.GetEndedRevision(),
		Frontends: m.GetFrontends(), Backends: m.GetBackends(), Resting: m.GetRestingNumbers(),
		Earlier: m.GetEarlierFrontends(), Refused: m.GetRefused(), Refusals: m.GetRefusedCount(),
	}
}

// text counts what the kernel has of services.
func (f *frontendStream) text() string {
	text := fmt.Sprintf("%d frontends to %d backends, of revision %d", f.Frontends, f.Backends, f.Revision)
	if f.Resting > 0 {
		text += fmt.Sprintf("; %d numbers rest", f.Resting)
	}
	return text
}

// warnings is what is wrong with services in the kernel. b is nil if the load
// balancer does not answer; what it refuses is among its problems.
func (f *frontendStream) warnings(b *loadBalancerStatus) (all []string) {
	if f == nil {
		return nil
	}
	if b == nil && f.Refusals > 0 {
		all = append(all, fmt.Sprintf("sluice-datapath: frontends that are not enforced: %d; the first: %s", f.Refusals,
			strings.Join(f.Refused[:min(1, len(f.Refused))], "")))
	}
	if !f.Complete || f.Error != "" {
		all = append(all, "sluice-datapath: the kernel keeps the services that it has: "+
			cmp.Or(f.Error, "the load balancer has not listed them yet"))
	}
	if f.Earlier > 0 {
		all = append(all,
			fmt.Sprintf("sluice-datapath: %d frontends stay that the load balancer does not name since its state was "+
				"lost, until all of its sources are complete", f.Earlier))
	}
	return all
}
