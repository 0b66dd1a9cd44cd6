// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tenants

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/model/shares"
)

// Values of Config.Unlabelled.
const (
	Each     = "each"
	Together = "together"
)

// Config defines the tenants of a cluster. Services that divide limits among tenants have it as the group "shares",
// with the same values in the whole cluster.
type Config struct {
	TenantLabel string `config:"tenantLabel" help:"label of a Namespace that names its tenant"`
	Unlabelled  string `config:"unlabelled" help:"each: a namespace without the label is a tenant; together: they are one"`

	Guarantees map[string]string `config:"guarantees" help:"part of each limit, in percent, that is reserved for a tenant"`

	SystemNamespaces []string `config:"systemNamespaces" help:"namespaces of the tenant system in addition to kube-system"`
}

// Defaults returns the settings of a cluster without guarantees.
func Defaults() Config {
	return Config{
		TenantLabel: shares.DefaultTenantLabel, Unlabelled: Each, SystemNamespaces: []string{"sluice-system"},
	}
}

// Settings converts the configuration for package shares. c must be valid.
func (c *Config) Settings() shares.Settings {
	s := shares.Settings{
		TenantLabel: c.TenantLabel, Together: c.Unlabelled == Together, SystemNamespaces: slices.Clone(c.SystemNamespaces),
	}
	for name, percent := range c.Guarantees {
		if s.Guarantees == nil {
			s.Guarantees = make(map[string]int, len(c.Guarantees))
		}
		s.Guarantees[name], _ = strconv.Atoi(strings.TrimSuffix(percent, "%"))
	}
	return s
}

// Validate reports invalid settings. Package config calls it.
func (c *Config) Validate() error {
	var p config.Problems
	if c.Unlabelled != Each && c.Unlabelled != Together {
		p.Addf("unlabelled", "%q is not %s or %s", c.Unlabelled, Each, Together)
	}
	if c.TenantLabel == "" {
		p.Addf("tenantLabel", "must name a label")
	}
	numbers := true
	for _, name := range slices.Sorted(maps.Keys(c.Guarantees)) {
		if _, err := strconv.Atoi(strings.TrimSuffix(c.Guarantees[name], "%")); err != nil {
			p.Addf("guarantees", "%s: %q is not a percentage", name, c.Guarantees[name])
			numbers = false
		}
	}
	if numbers {
		if err := c.Settings().Validate(); err != nil {
			p.Addf("guarantees", "%s", strings.TrimPrefix(err.Error(), "shares.guarantees: "))
		}
	}
	return p.Err()
}
