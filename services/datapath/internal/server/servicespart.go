// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import "github.com/prometheus/client_golang/prometheus"

// ServicesPart describes the services that are translated.
type ServicesPart struct {
	Frontends
	// Kernel reads the services that the kernel translates.
	Kernel Services
}

var (
	frontendsDesc       = desc("frontends", "Addresses of services that the kernel translates.")
	backendsDesc        = desc("backends", "Backends of these frontends, including IDs in quarantine.")
	serviceRevisionDesc = desc("service_revision",
		"Revision of the services that the kernel enforces, except for refused frontends.")
	serviceEndedDesc = desc("service_ended_revision",
		"Revision of the services whose removed backends are no longer used by sockets.")
	refusedFrontendsDesc = desc("refused_frontends", "Frontends that are not enforced as sluice-loadbalancer sent them.")
	restingServicesDesc  = desc("resting_service_numbers",
		"IDs of removed frontends and backends that connections may still use.")
	endedSocketsDesc = desc("ended_sockets_total", "Sockets that were ended because they sent to a removed backend.")
	earlierDesc      = desc("earlier_frontends",
		"Frontends that are kept although sluice-loadbalancer, which lost its state, does not list them.")
)

func (p ServicesPart) report(r *report) error {
	st := p.FrontendStatus()
	counts, err := p.Kernel.CountFrontends()
	if err != nil {
		return err
	}
	r.FrontendStream = frontendStream(st, counts)
	r.dependencies["loadbalancer"] = st.Err
	r.warn(frontendWarnings(st)...)
	return nil
}

// Describe implements prometheus.Collector.
func (ServicesPart) Describe(ch chan<- *prometheus.Desc) {
	describe(ch, frontendsDesc, backendsDesc, serviceRevisionDesc, serviceEndedDesc, refusedFrontendsDesc,
		restingServicesDesc, endedSocketsDesc, earlierDesc)
}

// Collect implements prometheus.Collector.
func (p ServicesPart) Collect(ch chan<- prometheus.Metric) {
	st := p.FrontendStatus()
	n, err := p.Kernel.CountFrontends()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(frontendsDesc, err)
		return
	}
	gauge(ch, frontendsDesc, float64(n.Frontends))
	gauge(ch, backendsDesc, float64(n.Backends))
	gauge(ch, restingServicesDesc, float64(n.Resting))
	gauge(ch, serviceRevisionDesc, float64(st.Revision))
	gauge(ch, serviceEndedDesc, float64(st.Ended))
	gauge(ch, refusedFrontendsDesc, float64(len(st.Refused())))
	gauge(ch, earlierDesc, float64(st.Earlier))
	counter(ch, endedSocketsDesc, p.Ended())
}
