// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"strings"
)

// Labels and values with a meaning to Sluice.
const (
	labelServiceName = "kubernetes.io/service-name"
	labelOtherProxy  = "service.kubernetes.io/service-proxy-name"
	annotationRanges = "service.beta.kubernetes.io/load-balancer-source-ranges"
	none             = "None" // spec.clusterIP of a headless service

	// annotationAlgorithm selects how a backend of the service is chosen: "table". Without it, the
	// datapath's default applies.
	annotationAlgorithm = "sluice.io/load-balancing-algorithm"
	algorithmTable      = "table"
)

// checkLabel returns why a text is not a DNS label, as names of services must be, or nil.
func checkLabel(s string) error {
	if len(s) > 63 {
		return fmt.Errorf("has %d characters, more than 63", len(s))
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && (c != '-' || i == 0 || i == len(s)-1) {
			return fmt.Errorf("must consist of lowercase letters, digits and '-', and must not begin or end with '-'")
		}
	}
	if s == "" {
		return fmt.Errorf("is empty")
	}
	return nil
}

// checkSubdomain returns why a text is not a DNS subdomain, as names of slices must be, or nil.
func checkSubdomain(s string) error {
	if len(s) > 253 {
		return fmt.Errorf("has %d characters, more than 253", len(s))
	}
	for label := range strings.SplitSeq(s, ".") {
		if checkLabel(label) != nil {
			return fmt.Errorf("must be lowercase letters, digits, '-' and '.' between them")
		}
	}
	return nil
}
