// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"path/filepath"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// Config is the configuration of this service.
type Config struct {
	StateDir            string         `config:"stateDir" help:"directory of the files that survive a restart"`
	Identity            string         `config:"identity" help:"unix socket of the identity service"`
	Kubernetes          kube.Settings  `config:"kubernetes"`
	Election            ElectionConfig `config:"election"`
	Announce            AnnounceConfig `config:"announce"`
	evaluation.Settings `config:",inline"`
}

// ElectionConfig names the Lease by which one process of the cluster is elected.
type ElectionConfig struct {
	Namespace string `config:"namespace" help:"namespace of the Lease"`
	Lease     string `config:"lease"     help:"name of the Lease"`
}

// AnnounceConfig selects the Services that get addresses of pools.
type AnnounceConfig struct {
	DefaultClass bool `config:"defaultClass" help:"LoadBalancer Services without a class get addresses, too"`
}

func defaults(p instance.Paths) Config {
	return Config{
		StateDir:   p.ServiceStateDir("controller"),
		Identity:   p.Socket("identity"),
		Kubernetes: kube.Defaults(),
		// Earlier versions of sluice-policy wrote the status of policies and used the same Lease. If such a process
		// still runs, only one of the two is elected.
		Election: ElectionConfig{Namespace: "sluice-system", Lease: "sluice-status"},
		Announce: AnnounceConfig{DefaultClass: true},
		Settings: evaluation.DefaultSettings(),
	}
}

// Validate reports invalid settings. Package config calls it.
func (c *Config) Validate() error {
	var p config.Problems
	if !filepath.IsAbs(c.StateDir) {
		p.Addf("stateDir", "%q is not an absolute path", c.StateDir)
	}
	if !filepath.IsAbs(c.Identity) {
		p.Addf("identity", "%q is not an absolute path", c.Identity)
	}
	if !c.Kubernetes.Enabled() {
		p.Addf("kubernetes", "kubernetes.api or kubernetes.kubeconfig is required")
	}
	if c.Election.Namespace == "" || c.Election.Lease == "" {
		p.Addf("election", "namespace and lease are required")
	}
	return p.Err()
}

// Calls returns the system calls that this service needs in addition to the calls that every service needs.
func (*Config) Calls() sandbox.Calls { return sandbox.Calls{Inet: true} }

// files returns the files that the service opens after startup.
func (c *Config) files() sandbox.Files { return sandbox.Files{Write: []string{c.StateDir}} }
