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

// enforces reports whether a subscriber programs the services into a kernel. Other subscribers only watch them.
func enforces(x *lbv1.SubscriberStatus) bool { return x.GetEnforces() }

// loadBalancerRows writes the rows about services. off is true if the datapath is configured not to translate
// services.
func loadBalancerRows(w io.Writer, r *lbv1.GetStatusResponse, off bool) {
	text := fmt.Sprintf("%d with %s, revision %d", r.GetServices(),
		output.Plural(r.GetEndpointSlices(), "endpoint slice", "endpoint slices"), r.GetRevision())
	if n := r.GetOrphanedSlices(); n > 0 {
		text += fmt.Sprintf("; %d slices wait for their service", n)
	}
	output.Row(w, "Services", text)
	text = fmt.Sprintf("%d to %s", r.GetFrontends(), output.Plural(r.GetBackends(), "backend", "backends"))
	for _, x := range r.GetSubscribers() {
		if x.GetEnforces() {
			text += fmt.Sprintf("; %s enforces revision %d", x.GetName(), x.GetRevision())
			if !x.GetConnected() {
				text += " and is not connected"
			}
		}
	}
	if off && !slices.ContainsFunc(r.GetSubscribers(), enforces) {
		text += "; the datapath translates none (loadBalancing.mode is off)"
	}
	output.Row(w, "Frontends", text)
	output.Row(w, "Service sources", sourcesText(r.GetSources()))
}

// loadBalancerWarnings returns problems of services. off is true if the datapath is configured not to translate
// services.
func loadBalancerWarnings(r *lbv1.GetStatusResponse, off bool) (all []string) {
	problems := textsOf(r.GetService())
	if n := r.GetService().GetOmittedProblemCount(); n > 0 {
		problems = append(problems, fmt.Sprintf("%d more problems are left out", n))
	}
	for _, problem := range problems {
		all = append(all, "sluice-loadbalancer: "+problem)
	}
	if r.GetRefused() > 0 && len(problems) == 0 {
		all = append(all,
			fmt.Sprintf("sluice-loadbalancer: %d objects or files were refused; see `sluice service list`", r.GetRefused()))
	}
	for _, x := range r.GetSources() {
		if !x.GetSynced() && x.GetError() == "" { // errors are among the problems
			all = append(all, "sluice-loadbalancer: source "+sourceName(x)+" is not complete yet")
		}
	}
	for _, x := range r.GetSubscribers() {
		if x.GetEnforces() && !x.GetConnected() {
			all = append(all,
				fmt.Sprintf("sluice-loadbalancer: %s is not connected: the kernel keeps the services of revision %d",
					x.GetName(), x.GetRevision()))
		}
	}
	if r.GetFrontends() > 0 && !off && !slices.ContainsFunc(r.GetSubscribers(), enforces) {
		all = append(all, "sluice-loadbalancer: no datapath enforces the services")
	}
	return all
}

// frontendText returns the number of frontends and backends in the kernel.
func frontendText(f *datapathv1.FrontendStream) string {
	text := fmt.Sprintf("%s to %s, of revision %d", output.Plural(f.GetFrontends(), "frontend", "frontends"),
		output.Plural(f.GetBackends(), "backend", "backends"), f.GetRevision())
	if n := f.GetRestingNumbers(); n > 0 {
		text += fmt.Sprintf("; %d numbers rest", n)
	}
	return text
}

// frontendWarnings returns problems of services in the kernel. f is nil if the datapath translates no services. b is
// nil if the load balancer does not answer; if it answers, its problems already include refused frontends.
func frontendWarnings(f *datapathv1.FrontendStream, b *lbv1.GetStatusResponse) (all []string) {
	if f == nil {
		return nil
	}
	if n := f.GetRefusedCount(); b == nil && n > 0 {
		all = append(all, fmt.Sprintf("sluice-datapath: frontends that are not enforced: %d; the first: %s", n,
			strings.Join(f.GetRefused()[:min(1, len(f.GetRefused()))], "")))
	}
	if !f.GetComplete() || f.GetError() != "" {
		all = append(all, "sluice-datapath: the kernel keeps its present services: "+
			cmp.Or(f.GetError(), "the load balancer has not sent its services yet"))
	}
	if n := f.GetEarlierFrontends(); n > 0 {
		all = append(all,
			fmt.Sprintf("sluice-datapath: %d frontends from before the load balancer lost its state stay until all of "+
				"its sources are complete", n))
	}
	return all
}
